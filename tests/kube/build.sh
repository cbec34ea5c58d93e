#!/usr/bin/env bash
# Builds Kubernetes 1.20.2 for tests, from the source package of Debian 12 with Debian's Go: the network
# beyond Debian's mirrors is not needed.
#
#   tests/kube/build.sh [--check]
#
# Puts kubelet, kube-apiserver, kube-scheduler and kube-controller-manager into
# ${FGPU_KUBE_CACHE:-${XDG_CACHE_HOME:-~/.cache}/fgpuspawner/kubernetes}/bin and prints that folder. It takes
# three minutes of two cores and 3 GiB, of which 210 MB stay; where all four are there already, it does nothing.
# --check   only says whether they are there: status 0 or 1
set -euo pipefail

readonly PROGRAMS=(kubelet kube-apiserver kube-scheduler kube-controller-manager)
readonly RELEASE=bookworm
readonly GO=/usr/lib/go-1.19/bin
here=$(cd "$(dirname "$0")" && pwd)
readonly here

cache=${FGPU_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fgpuspawner/kubernetes}
[[ $cache == /* ]] || cache=$PWD/$cache

note() { printf 'kube/build: %s\n' "$*" >&2; }
die() { note "$*"; exit 1; }

is_built() {
    local program
    for program in "${PROGRAMS[@]}"; do
        [[ -x $cache/bin/$program ]] || return 1
    done
}

if is_built; then
    echo "$cache/bin"
    exit 0
fi
[[ ${1:-} != --check ]] || exit 1

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if is_built; then
    echo "$cache/bin"
    exit 0
fi
# Of a build that was killed.
rm -rf "$cache"/build.*
work=$(mktemp -d "$cache/build.XXXXXX")
# Go makes the folders of its modules read-only.
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

. /etc/os-release
[[ ${VERSION_CODENAME:-} == "$RELEASE" ]] || die "Kubernetes is built on Debian 12 ($RELEASE) only"
# shellcheck disable=SC2034  # packages.sh writes its log there
dir=$work
# shellcheck source-path=SCRIPTDIR source=../packages.sh
. "$here/../packages.sh"
reason=$(install_packages golang-1.19-go dpkg-dev make rsync) || die "$reason"

# --- The source -----------------------------------------------------------------------------------

# The machine's own mirrors and keys, as a list of sources beside its own, which stays as it is: one package
# source that is named twice with different keys breaks apt for everybody.
list_sources() {
    mkdir -p "$work/apt/parts" "$work/apt/lists/partial"
    { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
        sed -nE "s/^deb +(.* )$RELEASE +(main|.* main)( .*)?\$/deb-src \1$RELEASE main/p" >"$work/apt/sources.list"
    # A blank line between files, so that each stays a paragraph of its own.
    { awk 'FNR == 1 { print "" } { print }' /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } |
        awk -v RS= -v ORS='\n\n' -v suite="Suites:([^\n]* )? *$RELEASE( |\n|\$)" '
            /Types:[^\n]* deb( |\n|$)/ && $0 ~ suite && /Components:[^\n]* main( |\n|$)/ && !/Enabled: *(no|false)/ {
                sub(/Types:[^\n]*/, "Types: deb-src")
                print
            }' >"$work/apt/parts/kubernetes.sources"
    [[ -s $work/apt/sources.list || -s $work/apt/parts/kubernetes.sources ]] ||
        die "apt has no source for $RELEASE's main, which has Kubernetes"
}

apt_source() {
    apt-get -q -o Dir::Etc::sourcelist="$work/apt/sources.list" -o Dir::Etc::sourceparts="$work/apt/parts" \
        -o Dir::State::lists="$work/apt/lists" -o Dir::Cache::srcpkgcache= -o Dir::Cache::pkgcache= \
        -o APT::Sandbox::User=root "$@"
}

list_sources
{
    apt_source update
    cd "$work"
    apt_source source kubernetes
} >"$cache/build.log" 2>&1 </dev/null || die "the source package cannot be had: $(last_line "$cache/build.log")"
source_folder=$(find "$work" -maxdepth 1 -type d -name 'kubernetes-1.20*')
[[ -n $source_folder ]] || die "the source package kubernetes is not of version 1.20"

# --- The programs ---------------------------------------------------------------------------------

cd "$source_folder"
mkdir -p .go/src/k8s.io "$work/home" "$work/bin"
ln -s ../../.. .go/src/k8s.io/kubernetes
unset GOFLAGS
export PATH="$GO:$PATH" CGO_ENABLED=0 GO111MODULE=off GOTOOLCHAIN=local GOPROXY=off
export HOME="$work/home" GOCACHE="$work/gocache" GOPATH="$PWD/.go"
readonly PACKAGE=k8s.io/kubernetes

# The one file that the programs need and the archive lacks. The project's own makefile looks through all of the
# source for it, four times.
write_openapi() {
    local folders gen=$work/openapi-gen
    folders=$(grep -rl --include='*.go' --exclude-dir=code-generator --exclude-dir=sample-apiserver \
        '^// +k8s:openapi-gen=' cmd pkg plugin staging/src | xargs -n1 dirname | LC_ALL=C sort -u |
        sed "s#^staging/src/#vendor/#; s#^#$PACKAGE/#" | paste -sd,) &&
        go build -o "$gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen &&
        "$gen" --logtostderr --input-dirs "$folders" --output-package "$PACKAGE/pkg/generated/openapi" \
            --output-file-base zz_generated.openapi --report-filename "$work/violations" \
            --go-header-file vendor/k8s.io/code-generator/hack/boilerplate.go.txt
}

# The archive says no version that the programs could tell.
flags="-s -w"
for package in client-go/pkg component-base; do
    for fact in Version=v1.20.2 Major=1 Minor=20 Commit=debian TreeState=clean; do
        flags+=" -X $PACKAGE/vendor/k8s.io/$package/version.git$fact"
    done
done
# Without what only clouds and Docker as a container runtime need, which is half of all code.
{
    cd ".go/src/$PACKAGE" && write_openapi &&
        go build -tags "providerless dockerless" -ldflags "$flags" -o "$work/bin/" "${PROGRAMS[@]/#/./cmd/}"
} >>"$cache/build.log" 2>&1 </dev/null 9>&- || die "it cannot be built: $(last_line "$cache/build.log")"
rm -rf "${cache:?}/bin"
mv "$work/bin" "$cache/bin"
is_built || die "the build made no whole set of programs in $cache/bin"
echo "$cache/bin"
