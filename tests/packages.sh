# shellcheck shell=bash
# Installs Debian packages. For scripts that set `dir`, a folder for the log, that have a function `note` for what a
# reader is told, and that close descriptor 9, where they hold a lock, to what they start.

# shellcheck disable=SC2154
readonly apt_updated="$dir/apt-updated"
rm -f "$apt_updated"

is_root() { ((EUID == 0)); }

# In a subshell, so that its trap removes the policy file however it ends.
install_packages() ( # PACKAGE...; on failure prints the reason and returns 1
    missing=() policy=/usr/sbin/policy-rc.d
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^.[iWt]' ||
            missing+=("$package")
    done
    ((${#missing[@]})) || exit 0
    command -v apt-get >/dev/null || { echo "there is no apt-get to install ${missing[*]}"; exit 1; }
    is_root || { echo "not installed (${missing[*]}), and only root may install it"; exit 1; }
    # A package that starts its own daemon would leave one that `stop` does not know.
    if [[ ! -e $policy ]]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    note "installing ${missing[*]}"
    apt=(apt-get -o DPkg::Lock::Timeout=300)
    exec 3>&1 >>"$dir/apt.log" 2>&1 </dev/null 9>&-
    # A failed update still leaves the lists of before, which may be enough.
    if [[ ! -e $apt_updated ]] && "${apt[@]}" update; then touch "$apt_updated"; fi
    if ! DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends \
        "${missing[@]}"; then
        echo "apt-get could not install ${missing[*]}: $(last_line "$dir/apt.log")" >&3
        exit 1
    fi
)

last_line() { # FILE: its last line that says something, at most 300 characters
    { grep -v '^[[:space:]]*$' "$1" 2>/dev/null || echo "(nothing logged)"; } | tail -n 1 | cut -c1-300
}
