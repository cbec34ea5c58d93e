#!/usr/bin/env bash
# The programs that the tests talk to: a Docker engine, PostgreSQL, Chromium, slapd, and shells and terminals.
#
#   tests/services.sh [start] [--dir DIR] [--env FILE] [--only LIST] [--postgres-port PORT]
#   tests/services.sh stop [--dir DIR]
#
# start  Uses what is there, installs from Debian packages and starts what is not (as root, where
#        apt-get exists), and prints shell assignments to standard output, nothing else:
#          FGPU_TEST_DOCKER=1              `docker info` answers
#          FGPU_TEST_POSTGRES_URL=...      a database fgpu_test that tests may empty
#          FGPU_TEST_CHROMIUM=...          the browser's path
#        slapd and the tools (zsh, fish, tmux, a loader of OpenCL, ...) are only installed: tests start them.
#        A service that cannot be had is left out, with one line on standard error saying why.
#        The exit status is then still 0, because tests skip with that reason; with CI=true it is 1.
# stop   Ends what `start` started with the same --dir, and nothing else.
#
# --dir DIR            data, logs and pid files; default ${XDG_RUNTIME_DIR:-/tmp}/fgpu-tests
# --env FILE           writes the assignments there too
# --only LIST          comma-separated, of docker, postgres, chromium, slapd, tools
# --postgres-port PORT loopback port of a newly started cluster; default: a free one
#
# What is in the environment already under one of these names is passed on as it is.
set -euo pipefail

readonly PG_FIRST_PORT=54330 PG_LAST_PORT=54429
readonly ENGINE_TIMEOUT_S=60 PROBE_TIMEOUT_S=10

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "$0"; }
note() { printf 'services: %s\n' "$*" >&2; }
die() { note "$*"; exit 2; }

action=start dir="${XDG_RUNTIME_DIR:-/tmp}/fgpu-tests" env_file="" only="docker,postgres,chromium,slapd,tools"
pg_port=""
while (($#)); do
    case $1 in
        start | stop) action=$1 ;;
        --dir | --env | --only | --postgres-port)
            (($# >= 2)) || die "$1 needs a value"
            case $1 in
                --dir) dir=$2 ;;
                --env) env_file=$2 ;;
                --only) only=$2 ;;
                --postgres-port) pg_port=$2 ;;
            esac
            shift
            ;;
        -h | --help) usage; exit 0 ;;
        *) die "unknown argument '$1'; see $0 --help" ;;
    esac
    shift
done
[[ $dir == /* ]] || dir=$PWD/$dir
[[ -z $pg_port || $pg_port =~ ^[0-9]{1,5}$ ]] || die "--postgres-port '$pg_port' is no port number"
[[ $only, =~ ^((docker|postgres|chromium|slapd|tools),)+$ ]] ||
    die "--only '$only': a comma-separated list of docker, postgres, chromium, slapd, tools"

# The folder's name is guessable and root writes there, so somebody else's folder is refused.
[[ ! -L $dir ]] || die "$dir is a link; give another --dir"
(umask 022 && mkdir -p "$dir")
[[ -O $dir ]] || die "$dir belongs to somebody else; give another --dir"

# Two runs at once would install and start everything twice. The daemons close descriptor 9: one
# that kept it open would hold the lock for as long as it lives.
exec 9>"$dir/lock"
flock -w 600 9 || die "another $0 has held $dir/lock for ten minutes"

has_systemd() { [[ -d /run/systemd/system ]]; }
alive_as() { # PID COMMAND: is this process that program? Process numbers are reused.
    [[ $1 =~ ^[0-9]+$ && -r /proc/$1/comm && $(</proc/"$1"/comm) == "$2"* ]]
}
read_first() { # FILE: its first word, or nothing
    local word=""
    if [[ -r $1 ]]; then read -r word _ <"$1" || true; fi
    printf '%s' "$word"
}

# shellcheck source-path=SCRIPTDIR source=packages.sh
. "$(dirname "$0")/packages.sh"

# --- Docker ---------------------------------------------------------------------------------------

docker_answers() {
    command -v docker >/dev/null && timeout "$PROBE_TIMEOUT_S" docker info >/dev/null 2>&1
}

start_docker() { # sets the assignment, or returns 1 with `reason` set
    if ! docker_answers; then
        if [[ -n ${DOCKER_HOST:-} ]]; then
            reason="the engine that DOCKER_HOST names does not answer"
            return 1
        fi
        if ! command -v dockerd >/dev/null || ! command -v iptables >/dev/null; then
            reason=$(install_packages docker.io iptables iproute2) || return 1
        fi
        # Newer Debian releases keep the client apart, as a mere recommendation.
        if ! command -v docker >/dev/null; then
            reason=$(install_packages docker-cli) || return 1
        fi
        is_root || { reason="no engine answers, and only root may start one"; return 1; }
        if has_systemd; then
            systemctl start docker >>"$dir/dockerd.log" 2>&1 ||
                { reason="systemctl start docker failed: $(last_line "$dir/dockerd.log")"; return 1; }
            touch "$dir/docker.systemd"
        else
            start_dockerd
        fi
        wait_for_docker || return 1
        if is_root; then sweep; fi
    fi
    # For images/build.sh --base host, which makes the image out of these packages' files.
    if is_root && command -v apt-get >/dev/null; then
        install_packages tini procps ca-certificates curl git less nano python3-venv >/dev/null ||
            note "tini, procps, or a tool for images is missing"
        # R, for the image of a course: some 14 s.
        install_packages r-cran-irkernel >/dev/null || note "r-cran-irkernel is missing"
        # It would serve on somebody's own machine from then on.
        [ -z "${CI:-}" ] || install_packages openssh-server >/dev/null || note "openssh-server is missing"
    fi
    assign FGPU_TEST_DOCKER 1
}

start_dockerd() {
    local stale=/var/run/docker/containerd/containerd.pid
    # After a crash of the machine these name whichever process has the number now, and dockerd
    # would take it for its own.
    alive_as "$(read_first "$dir/dockerd.pid")" dockerd || rm -f "$dir/dockerd.pid"
    alive_as "$(read_first "$stale")" containerd || rm -f "$stale"
    # A session of its own, and no descriptor of ours: it outlives the shell and the pipe.
    setsid dockerd --host unix:///var/run/docker.sock --pidfile "$dir/dockerd.pid" \
        >"$dir/dockerd.log" 2>&1 </dev/null 9>&- &
    dockerd_job=$!
}

# What tests leave that were killed: hundreds of networks, and rules for them, slow down every later run.
sweep() {
    local tool table tag line
    docker network prune --force --filter label=fgpu.installation >>"$dir/dockerd.log" 2>&1 || true
    for tool in iptables ip6tables; do
        for table in filter security; do
            for tag in $("$tool" -w -t "$table" -S 2>/dev/null | sed -n 's/^-N FGPU-[A-Z]*-//p' | sort -u); do
                # Of an installation that has sessions.
                if compgen -G "/sys/class/net/fgpu$tag*" >/dev/null; then continue; fi
                "$tool" -w -t "$table" -S | grep -e "-j FGPU-[A-Z]*-$tag\$" | sed 's/^-A/-D/' |
                    while read -r line; do
                        # shellcheck disable=SC2086
                        "$tool" -w -t "$table" $line || true
                    done
                "$tool" -w -t "$table" -S | sed -n "s/^-N \(FGPU-[A-Z]*-$tag\)\$/\1/p" |
                    while read -r line; do
                        "$tool" -w -t "$table" -F "$line" && "$tool" -w -t "$table" -X "$line" || true
                    done
            done
        done
    done >>"$dir/dockerd.log" 2>&1
}

wait_for_docker() {
    local deadline=$((SECONDS + ENGINE_TIMEOUT_S))
    until docker_answers; do
        if [[ -n ${dockerd_job:-} ]] && ! kill -0 "$dockerd_job" 2>/dev/null; then
            reason="dockerd ended: $(last_line "$dir/dockerd.log")"
            return 1
        fi
        if ((SECONDS >= deadline)); then
            reason="dockerd did not answer within $ENGINE_TIMEOUT_S s; see $dir/dockerd.log"
            return 1
        fi
        sleep 0.2
    done
}

stop_docker() {
    local pid
    if [[ -e $dir/docker.systemd ]]; then
        systemctl stop docker.socket docker && rm -f "$dir/docker.systemd"
        return
    fi
    pid=$(read_first "$dir/dockerd.pid")
    if alive_as "$pid" dockerd; then end_process "$pid" dockerd 60; fi
    rm -f "$dir/dockerd.pid"
}

end_process() { # PID COMMAND SECONDS: asks, waits, then insists
    local deadline=$((SECONDS + $3))
    note "stopping $2 ($1)"
    kill -TERM "$1"
    while alive_as "$1" "$2"; do
        if ((SECONDS >= deadline)); then
            note "$2 ($1) ignored the request for $3 s; killing it"
            kill -KILL "$1" 2>/dev/null || true
            return
        fi
        sleep 0.1
    done
}

# --- PostgreSQL -----------------------------------------------------------------------------------

# PostgreSQL refuses to run as root.
as_postgres() {
    if is_root; then (cd / && runuser -u postgres -- "$@" 9>&-); else "$@" 9>&-; fi
}

find_postgres() { # prints the folder of the newest server's programs
    local found="" candidate
    for candidate in /usr/lib/postgresql/*/bin/initdb; do
        [[ -x $candidate ]] && found+="${candidate%/initdb}"$'\n'
    done
    found=$(sort -V <<<"$found" | tail -n 1)
    if [[ -z $found ]] && command -v pg_ctl >/dev/null; then
        found=$(dirname "$(readlink -f "$(command -v pg_ctl)")")
    fi
    [[ -n $found ]] && printf '%s' "$found"
}

postgres_answers() { # PORT
    timeout "$PROBE_TIMEOUT_S" "$pg_bin/psql" --no-psqlrc --quiet --no-password --tuples-only \
        --host 127.0.0.1 --port "$1" --username postgres --dbname fgpu_test \
        --command 'select 1' >/dev/null 2>&1
}

postgres_data() { # prints the cluster's folder, making its parent where needed
    local recorded parent="$dir/postgres"
    recorded=$(read_first "$dir/postgres.data")
    if [[ -n $recorded && -d $recorded ]]; then
        printf '%s' "$recorded"
        return
    fi
    mkdir -p "$parent"
    if is_root; then
        chown postgres: "$parent"
        # A runtime folder is its owner's alone, so user postgres may not get through to it.
        as_postgres test -w "$parent" 2>/dev/null ||
            { parent=$(mktemp -d /tmp/fgpu-postgres.XXXXXX) && chown postgres: "$parent"; }
    fi
    printf '%s\n' "$parent/data" >"$dir/postgres.data"
    printf '%s' "$parent/data"
}

start_postgres() {
    if [[ -n ${FGPU_TEST_POSTGRES_URL:-} ]]; then
        assign FGPU_TEST_POSTGRES_URL "$FGPU_TEST_POSTGRES_URL"
        return
    fi
    if ! pg_bin=$(find_postgres); then
        reason=$(install_packages postgresql) || return 1
        pg_bin=$(find_postgres) || { reason="the package postgresql brought no server"; return 1; }
    fi
    local data port log
    data=$(postgres_data)
    log=$(dirname "$data")/postgres.log
    if as_postgres "$pg_bin/pg_ctl" status --pgdata "$data" >/dev/null 2>&1; then
        port=$(sed -n 4p "$data/postmaster.pid")
    else
        if [[ ! -s $data/PG_VERSION ]]; then
            as_postgres "$pg_bin/initdb" --pgdata "$data" --username postgres --auth trust \
                --encoding UTF8 --locale C.UTF-8 --no-sync >"$dir/initdb.log" 2>&1 ||
                { reason="initdb failed: $(last_line "$dir/initdb.log")"; return 1; }
        fi
        launch_postgres "$data" "$log" || return 1
    fi
    # A test may have dropped it, or a run ended between the two steps.
    if ! postgres_answers "$port"; then
        as_postgres "$pg_bin/createdb" --host 127.0.0.1 --port "$port" --username postgres \
            --no-password fgpu_test >"$dir/createdb.log" 2>&1 ||
            { reason="createdb failed: $(last_line "$dir/createdb.log")"; return 1; }
    fi
    assign FGPU_TEST_POSTGRES_URL "postgresql+psycopg://postgres@127.0.0.1:$port/fgpu_test"
}

launch_postgres() { # DATA LOG; sets `port`
    local candidates candidate options
    if [[ -n $pg_port ]]; then
        candidates=$pg_port
    else
        candidates=$(seq "$PG_FIRST_PORT" "$PG_LAST_PORT")
    fi
    reason="no free port between $PG_FIRST_PORT and $PG_LAST_PORT"
    for candidate in $candidates; do
        # Answered already: somebody else's. A later loser of the race fails to bind and goes on.
        if (exec 8<>"/dev/tcp/127.0.0.1/$candidate") 2>/dev/null; then
            reason="port $candidate is taken"
            continue
        fi
        # Nothing here needs to survive a power cut, and the tests commit thousands of times.
        options="-p $candidate -c listen_addresses=127.0.0.1 -c unix_socket_directories=''"
        options+=" -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
        options+=" -c max_connections=200"
        if as_postgres "$pg_bin/pg_ctl" start --pgdata "$1" --log "$2" --wait --timeout 120 \
            --silent --options "$options" >/dev/null 2>&1 </dev/null; then
            touch "$dir/postgres.started"
            port=$candidate
            return 0
        fi
        reason="PostgreSQL did not start: $(last_line "$2")"
        grep -q 'could not bind' <<<"$(tail -n 20 "$2" 2>/dev/null)" || return 1
    done
    return 1
}

stop_postgres() {
    local data
    [[ -e $dir/postgres.started ]] || return 0
    data=$(read_first "$dir/postgres.data")
    if [[ -s $data/postmaster.pid ]] && pg_bin=$(find_postgres); then
        note "stopping PostgreSQL in $data"
        as_postgres "$pg_bin/pg_ctl" stop --pgdata "$data" --mode fast --wait --silent ||
            note "pg_ctl stop failed for $data"
    fi
    rm -f "$dir/postgres.started"
}

# --- Chromium -------------------------------------------------------------------------------------

find_chromium() { # NAME...: prints the first browser that runs; Ubuntu's package is a stub without snapd
    local name path
    for name; do
        path=$(command -v "$name") || continue
        if timeout "$PROBE_TIMEOUT_S" "$path" --version >/dev/null 2>&1; then
            printf '%s' "$path"
            return 0
        fi
    done
    return 1
}

start_chromium() {
    local path=${FGPU_TEST_CHROMIUM:-}
    # The one without a window's frame first: it draws the same pages with half of the processor's time.
    if [[ -z $path ]] && ! path=$(find_chromium chromium-headless-shell); then
        reason=$(install_packages chromium-headless-shell fonts-dejavu-core) &&
            path=$(find_chromium chromium-headless-shell) || path=
    fi
    if [[ -z $path ]] && ! path=$(find_chromium chromium chromium-browser google-chrome); then
        reason=$(install_packages chromium fonts-dejavu-core) || return 1
        path=$(find_chromium chromium) || { reason="chromium is installed and does not run"; return 1; }
    fi
    # Without one font every text is boxes, and pictures of pages differ from machine to machine.
    if is_root && command -v apt-get >/dev/null; then
        install_packages fonts-dejavu-core >/dev/null || note "fonts-dejavu-core is missing"
    fi
    assign FGPU_TEST_CHROMIUM "$path"
}

# --- slapd ----------------------------------------------------------------------------------------

start_slapd() {
    if [[ -x /usr/sbin/slapd ]] && command -v ldapmodify >/dev/null; then return; fi
    if has_systemd && [ -z "${CI:-}" ]; then
        reason="Debian's package would serve on this machine from then on; install slapd and ldap-utils yourself"
        return 1
    fi
    reason=$(install_packages slapd ldap-utils) || return 1
}

# --- What tests run or load -----------------------------------------------------------------------

start_tools() {
    # Not a second systemd, or a first one that would be taken for this machine's.
    local packages=(zsh fish tmux ocl-icd-libopencl1 debootstrap)
    command -v systemctl >/dev/null || packages+=(systemd)
    reason=$(install_packages "${packages[@]}") || return 1
}

# --- The command ----------------------------------------------------------------------------------

assignments=""
assign() { assignments+="$1=$(printf '%q' "$2")"$'\n'; }

if [[ $action == stop ]]; then
    stop_docker
    stop_postgres
    exit 0
fi

lacking=0
for service in ${only//,/ }; do
    reason=""
    if ! "start_$service"; then
        note "no $service: ${reason:-unknown}"
        lacking=1
    fi
done
printf '%s' "$assignments"
if [[ -n $env_file ]]; then
    # Renamed into place: a reader sees the old assignments or the new ones, never half a file.
    printf '%s' "$assignments" >"$env_file.tmp.$$"
    mv -f "$env_file.tmp.$$" "$env_file"
fi
if ((lacking)) && [[ ${CI:-} == true ]]; then exit 1; fi
