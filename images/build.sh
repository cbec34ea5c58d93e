#!/usr/bin/env bash
# Builds session images.
#
#   images/build.sh NAME [--base REF|host] [--tag TAG] [--labextension WHEEL|none]
#                        [--label NAME=VALUE]... [--output FILE] [--force] [--smoke]
#   images/build.sh variant --from REF --tag TAG [--label NAME=VALUE]...
#
# NAME is a folder here that has a Dockerfile, `base` for the default image. Prints the image's id.
# variant adds labels to an image that is there: a second one under another name, in a blink.
#
# --base REF           the registry image to build on; default: the Dockerfile's own
# --base host          no registry: the image is made of this machine's Debian packages (base only)
# --tag TAG            default fgpuspawner/NAME:0.1
# --labextension       the wheel of labextension/, or none; default: the newest in labextension/dist
# --label NAME=VALUE   sets a label over the usual ones, e.g. fgpu.slug=demo
# --output FILE        with --base host: keeps the archive that `docker load` reads, too
# --force              with --base host: builds although nothing changed
# --smoke              then runs images/smoke.py in a container of it
#
# FGPU_IMAGE_BASE is the default of --base, FGPU_IMAGE_CACHE the folder that keeps the last archive.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here PYTHON=/usr/bin/python3
readonly REFERENCE='^[a-z0-9][a-z0-9._:/@-]{0,254}$'

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "$0"; }
note() { printf 'images: %s\n' "$*" >&2; }
die() { note "$*"; exit 1; }

name="" base=${FGPU_IMAGE_BASE:-} tag="" labextension="" output="" from="" force="" smoke=""
labels=()
while (($#)); do
    case $1 in
        --base | --tag | --labextension | --label | --output | --from)
            (($# >= 2)) || die "$1 needs a value"
            case $1 in
                --base) base=$2 ;;
                --tag) tag=$2 ;;
                --labextension) labextension=$2 ;;
                --label) labels+=("$2") ;;
                --output) output=$2 ;;
                --from) from=$2 ;;
            esac
            shift
            ;;
        --force) force=yes ;;
        --smoke) smoke=yes ;;
        -h | --help) usage; exit 0 ;;
        -*) die "unknown option '$1'; see $0 --help" ;;
        *) [[ -z $name ]] || die "two names, '$name' and '$1'"; name=$1 ;;
    esac
    shift
done
[[ -n $name ]] || die "which image? see $0 --help"
[[ $name =~ ^[a-z0-9][a-z0-9-]{0,39}$ ]] || die "name '$name': 1-40 of a-z, 0-9 and -"
tag=${tag:-fgpuspawner/$name:0.1}
for reference in "$tag" ${base:+"$base"} ${from:+"$from"}; do
    [[ $reference =~ $REFERENCE ]] || die "'$reference' is no image reference"
done
for label in "${labels[@]}"; do
    [[ $label =~ ^[a-z0-9._-]+=[^[:cntrl:]]*$ ]] || die "--label '$label' is no NAME=VALUE"
done
docker info >/dev/null 2>&1 || die "no Docker engine answers (tests/services.sh can start one)"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

find_wheel() { # sets `wheel`, empty for none
    wheel=""
    case $labextension in
        none) ;;
        "")
            wheel=$(find "$here/../labextension/dist" -maxdepth 1 -name 'jupyterlab_fgpu-*.whl' \
                2>/dev/null | sort -V | tail -n 1) || true
            [[ -n $wheel ]] ||
                die "no wheel in labextension/dist: build it, or give --labextension WHEEL|none"
            ;;
        *.whl)
            [[ -f $labextension ]] || die "--labextension $labextension: no such file"
            wheel=$labextension
            ;;
        *) die "--labextension '$labextension': a file ending in .whl, or none" ;;
    esac
}

describe_python() { # VERSION: the labels of an image whose framework is Python itself
    described=(slug=python "name=Python $1" framework=python "version=$1" "python=$1")
}

# --- From a registry's image ----------------------------------------------------------------------

build_from_registry() {
    local context=$scratch/context arguments=() version pair key
    mkdir -p "$context/wheels" "$context/server"
    touch "$context/wheels/.keep"
    if [[ -n $wheel ]]; then cp "$wheel" "$context/wheels/"; fi
    cp "$here/requirements.txt" "$context/"
    cp "$here"/server/fgpu_lazy_imports.* "$context/server/"
    if [[ -z $base ]]; then
        base=$(sed -n 's/^ARG BASE=//p' "$here/$name/Dockerfile")
    fi
    # Asked of the base: the label must not claim a version that the base does not have.
    version=$(docker run --rm --entrypoint python3 "$base" -c \
        'import sys; print("%d.%d" % sys.version_info[:2])') ||
        die "cannot run python3 of $base (see above); without a registry, --base host"
    describe_python "$version"
    for pair in "${described[@]}"; do
        key=${pair%%=*}
        arguments+=(--build-arg "FGPU_${key^^}=${pair#*=}")
    done
    # The wheel brings fgpu-start, which takes a session's identity over standard input.
    if [[ -n $wheel ]]; then arguments+=(--label fgpu.handover=1); fi
    for label in "${labels[@]}"; do arguments+=(--label "$label"); done
    docker build --file "$here/$name/Dockerfile" --build-arg "BASE=$base" --tag "$tag" \
        "${arguments[@]}" "$context" >&2
}

# --- From this machine's packages -----------------------------------------------------------------

find_uv() {
    local candidate
    for candidate in "$(command -v uv || true)" "$here/../.venv/bin/uv"; do
        if [[ -x $candidate ]]; then printf '%s' "$candidate"; return; fi
    done
    die "uv is not here: pip install uv"
}

image_of() { # HASH: the id of an image made of these inputs, not of one that was built on it
    local id
    for id in $(docker images --quiet --no-trunc --filter "label=fgpu.inputs=$1" | sort -u); do
        if [[ $(docker image inspect --format '{{.Created}}' "$id") == 2020-01-01T00:00:00Z ]]; then
            printf '%s' "$id"
            return
        fi
    done
}

build_from_host() {
    local uv inputs id archive cache pair arguments=()
    [[ $name == base ]] || die "--base host makes the image 'base' only"
    if [[ ! -x $PYTHON ]] || ! command -v dpkg-query >/dev/null; then
        die "--base host needs Debian 12, Ubuntu 24.04 or newer, with the package python3"
    fi
    uv=$(find_uv)
    describe_python "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    arguments+=(--uv "$uv")
    if [[ -n $wheel ]]; then arguments+=(--wheel "$wheel"); fi
    for pair in "${described[@]}"; do arguments+=(--label "fgpu.$pair"); done
    for label in "${labels[@]}"; do arguments+=(--label "$label"); done
    inputs=$("$PYTHON" -I "$here/hostimage.py" inputs "${arguments[@]}")

    id=""
    [[ -n $force || -n $output ]] || id=$(image_of "$inputs")
    if [[ -z $id ]]; then
        cache=${FGPU_IMAGE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fgpuspawner}
        mkdir -p "$cache"
        exec 9>"$cache/lock"
        flock -w 600 9 || die "another build has held $cache/lock for ten minutes"
        # Uncompressed where zstd is missing: then only this build has it.
        archive=$cache/$inputs.tar.zst
        if [[ -n $force || ! -f $archive ]]; then
            write_archive "${arguments[@]}"
        fi
        if [[ -f $archive ]]; then
            unpack=(zstd --quiet --decompress --stdout "$archive")
        else
            unpack=(cat "$scratch/image.tar")
        fi
        if [[ -n $output ]]; then "${unpack[@]}" >"$output"; fi
        id=$("${unpack[@]}" | docker load --quiet | sed -n 's/^Loaded image ID: //p')
        [[ $id == sha256:* ]] || die "docker load did not name the image"
    else
        note "nothing changed"
    fi
    docker tag "$id" "$tag"
}

write_archive() {
    # Beside the cache, not under /tmp: there it may be memory, and hard links from uv's cache fail.
    # What lies there now is of builds that were killed: this one holds the lock.
    rm -rf "$scratch" "$cache"/build.*
    scratch=$(mktemp -d "$cache/build.XXXXXX")
    "$PYTHON" -I "$here/hostimage.py" write "$@" --out "$scratch/image.tar"
    command -v zstd >/dev/null || return 0
    zstd --quiet -1 -T0 "$scratch/image.tar" -o "$scratch/image.tar.zst"
    # Only the last one is kept: each is a hundred megabytes.
    rm -f "$cache"/*.tar.zst
    mv "$scratch/image.tar.zst" "$archive"
}

# --- Variants, and the command ---------------------------------------------------------------------

build_variant() {
    local arguments=(--label fgpu.inputs=)
    [[ -n $from ]] || die "variant needs --from REF"
    for label in "${labels[@]}"; do arguments+=(--label "$label"); done
    # Quiet on success: clients without buildx warn about it every time.
    printf 'FROM %s\n' "$from" |
        docker build --quiet --tag "$tag" "${arguments[@]}" - >"$scratch/log" 2>&1 ||
        die "docker build failed: $(tail -n 1 "$scratch/log")"
}

run_smoke() {
    note "smoke test of $tag"
    timeout 300 docker run --rm --interactive --network none "$tag" python - \
        <"$here/smoke.py" >&2 || die "the smoke test of $tag failed"
}

if [[ $name == variant ]]; then
    build_variant
else
    [[ -f $here/$name/Dockerfile ]] || die "there is no images/$name/Dockerfile"
    find_wheel
    if [[ $base == host ]]; then build_from_host; else build_from_registry; fi
fi
if [[ -n $smoke ]]; then run_smoke; fi
docker image inspect --format '{{.Id}}' "$tag"
