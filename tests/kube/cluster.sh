#!/usr/bin/env bash
# A Kubernetes of one node for tests, whose pods really run: as root, without systemd, beside a dockerd.
#
#   tests/kube/cluster.sh up [--number N] [--env FILE] [--image FILE]...
#   tests/kube/cluster.sh down [N]
#   tests/kube/cluster.sh import N FILE      FILE as `docker save` writes it; - is standard input
#   tests/kube/cluster.sh freeze-PART N      thaw-PART, stop-PART (kill -9), start-PART
#
# up    Prints shell assignments to standard output, nothing else:
#         FGPU_TEST_KUBE=N             what the other commands take
#         FGPU_TEST_KUBECONFIG=...     the administrator's kubeconfig; beside it hub.kubeconfig, of the service
#                                      account `hub` in the namespace `jhub`, which may do nothing yet
#       There are these images then: pause, and of a dockerd that answers fgpuspawner/base:0.1. Pods and this machine reach each other by their addresses; this machine's is the
#       node's. It needs .venv, and what else is missing it builds (build.sh) and installs from Debian packages.
# down  Removes all that `up` has made, also after a crash and of a half-made one. Without N: every cluster.
#
# --number N   1 to 99: two clusters side by side have two; default: the first that is free
# --env FILE   writes the assignments there too
# PART         api, etcd, scheduler, controllers, containerd, kubelet
#
# All parts and pods are in one mount and one process namespace, so whatever happens, they and all that they have
# mounted are gone when its first process is. Outside are only: /run/fgpu-kube-N (a lock, and where the folder is),
# the folder, the bridge kubeN, one rule of iptables, and cgroups named fgpu-kube-N.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
readonly here root=$here/../.. LAST_NUMBER=99 READY_S=240
readonly PARTS='api|etcd|scheduler|controllers|containerd|kubelet'

usage() { sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p;}' "$0"; }
note() { printf 'kube: %s\n' "$*" >&2; }
die() { note "$*"; exit 2; }

# --- What a number stands for ---------------------------------------------------------------------

# N: sets what follows from it
use_number() {
    [[ $1 =~ ^[1-9][0-9]?$ ]] || die "'$1' is no number of a cluster: 1 to $LAST_NUMBER"
    number=$1
    lock=/run/fgpu-kube-$number
    bridge=kube$number
    cgroup=fgpu-kube-$number
    node=kube$number
    node_ip=10.218.$number.1
    port=$((20000 + 10 * number))
    run=""
    if [[ -s $lock ]]; then run=$(<"$lock"); fi
}

# The lock is held by the first process of the namespace, and by who makes or removes the cluster. Its file goes
# with the cluster: who waited for it may hold a lock on a file that is gone.
take_lock() { # SECONDS
    exec 9>>"$lock"
    flock -w "$1" 9 || return 1
    [[ $(stat -Lc %i "/proc/$$/fd/9") == "$(stat -c %i "$lock" 2>/dev/null)" ]] || take_lock "$1"
}

# The processes that hold the lock, but for this one. For $(...) only: what runs in there is to hold none.
holders() {
    exec 9>&-
    find /proc/[0-9]*/fd -lname "$lock" 2>/dev/null | cut -d/ -f3 | sort -u | grep -vx "$$" || true
}

first_process() { # the namespace's, as this machine numbers it
    local pid
    for pid in $(holders); do
        awk -v pid="$pid" '/^NSpid:/ && NF > 2 && $NF == 1 { print pid }' "/proc/$pid/status" 2>/dev/null || true
    done
}

# --- The node's own world -------------------------------------------------------------------------

# COMMAND...: runs it there
enter() {
    local first
    first=$(first_process)
    [[ -n $first ]] || die "cluster $number does not run"
    nsenter --target "$first" --mount --pid --wd=/ -- "$@" 9>&-
}

# The namespace's first process: it makes the place, and then buries orphans.
# shellcheck disable=SC2016
first_process_program='
set -eu
run=$1
bind() { mkdir -p "$run/own$1" && mount --bind "$run/own$1" "$1"; }
# What the parts write outside of the folder that they are told.
for folder in /run /var/lib /var/log; do bind "$folder"; done
# A kubelet sets these for the whole machine; it finds them set.
settings="vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 net/ipv4/ip_forward=1
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000"
for setting in $settings; do
    file=$run/own/sys/${setting%=*}
    mkdir -p "${file%/*}"
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done
touch "$run/entered"
trap "exit 0" TERM
while :; do sleep 3600 & wait $! || true; done
'

make_place() {
    mkdir -p "$run"/{pki,logs,pids,cni,kubelet,containerd}
    ip link add "$bridge" type bridge
    ip addr add "$node_ip/24" dev "$bridge"
    ip link set "$bridge" up
    # Where a dockerd runs, what crosses a bridge passes through iptables, which forwards nothing by default.
    if command -v iptables >/dev/null; then iptables -w -I FORWARD -i "$bridge" -o "$bridge" -j ACCEPT; fi
    local folder name
    for folder in $(cgroup_roots); do
        mkdir -p "$folder/$cgroup"
        for name in cpuset.cpus cpuset.mems; do
            # An empty one takes no process.
            if [[ -e $folder/$name ]]; then cat "$folder/$name" >"$folder/$cgroup/$name"; fi
        done
    done
    setsid unshare --mount --propagation private --pid --fork --kill-child=KILL --mount-proc \
        bash -c "$first_process_program" kube-first "$run" >"$run/logs/first" 2>&1 </dev/null &
    # How it ends is nothing for the shell to tell.
    disown
    wait_for 10 "the node's namespace" test -e "$run/entered"
}

cgroup_roots() { awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/self/mounts | sort -u; }

# All that is left of a cluster whose namespace is gone, or is to go. Needs the lock.
clear_place() {
    local deadline=$((SECONDS + 30)) folder
    for folder in $(cgroup_roots); do
        # Who is frozen does not die.
        find "$folder/$cgroup" -name freezer.state -exec sh -c 'echo THAWED >"$1"' - {} \; 2>/dev/null || true
    done
    while [[ -n $(holders) ]]; do
        # shellcheck disable=SC2046
        kill -KILL $(holders) 2>/dev/null || true
        ((SECONDS < deadline)) || die "the processes of cluster $number do not end"
        sleep 0.1
    done
    for folder in $(cgroup_roots); do
        while [[ -d $folder/$cgroup ]]; do
            find "$folder/$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null || true
            [[ ! -d $folder/$cgroup ]] && break
            ((SECONDS < deadline)) || die "$folder/$cgroup is still in use"
            sleep 0.1
        done
    done
    if command -v iptables >/dev/null; then
        while iptables -w -D FORWARD -i "$bridge" -o "$bridge" -j ACCEPT 2>/dev/null; do :; done
    fi
    ip link delete "$bridge" 2>/dev/null || true
    if [[ $run == */fgpu-kube."$number".* ]]; then rm -rf --one-file-system "$run"; fi
}

wait_for() { # SECONDS WHAT COMMAND...
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        parts_run
        ((SECONDS < deadline)) || die "$what is not ready in time"
        sleep 0.1
    done
}

# Of a cluster that is half made: the last words of each part, which go with its folder.
give_up() {
    local log
    for log in "$run"/logs/*; do
        note "$(basename "$log"): $(tail -n 2 "$log" 2>/dev/null | cut -c1-400 | tr '\n' ' ')"
    done
    clear_place
    rm -f "$lock"
}

install_parts() {
    local packages=(etcd-server containernetworking-plugins gcc libc6-dev iproute2 openssl curl) reason
    # Docker has it, or brings one of its own, beside which Debian's cannot be.
    command -v containerd >/dev/null || packages+=(containerd)
    # shellcheck disable=SC2034  # packages.sh writes its log there
    dir=$run
    # shellcheck source-path=SCRIPTDIR source=../packages.sh
    . "$here/../packages.sh"
    reason=$(install_packages "${packages[@]}") || die "$reason"
}

# --- Keys -----------------------------------------------------------------------------------------

certificate() { # NAME SUBJECT NAMES
    openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2"
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$3" >"$1.ext"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -out "$1.crt" -days 9 -extfile "$1.ext"
}

make_keys() (
    cd "$run/pki"
    umask 077
    openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=fgpu-kube -days 9
    openssl genrsa -out accounts.key 2048
    certificate api /CN=kube-apiserver "IP:127.0.0.1,IP:$node_ip,DNS:localhost,DNS:kubernetes.default.svc"
    certificate client /O=system:masters/CN=kubelet-client DNS:client
    certificate kubelet "/O=system:nodes/CN=system:node:$node" "IP:$node_ip,DNS:$node"
) >"$run/logs/keys" 2>&1

make_tokens() {
    local admin kubelet
    admin=$(openssl rand -hex 16) kubelet=$(openssl rand -hex 16)
    (
        umask 077
        printf '%s,admin,admin,"system:masters"\n%s,system:node:%s,node,"system:nodes"\n' \
            "$admin" "$kubelet" "$node" >"$run/pki/tokens.csv"
        kubeconfig "$admin" >"$run/admin.kubeconfig"
        kubeconfig "$kubelet" >"$run/node.kubeconfig"
    )
}

kubeconfig() { # TOKEN
    cat <<END
{"apiVersion": "v1", "kind": "Config", "current-context": "test",
 "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "jhub"}}],
 "clusters": [{"name": "test", "cluster": {"server": "https://$node_ip:$port",
   "certificate-authority-data": "$(base64 -w0 "$run/pki/ca.crt")"}}],
 "users": [{"name": "test", "user": {"token": "$1"}}]}
END
}

# --- The parts ------------------------------------------------------------------------------------

# PART: starts it; what it says goes to logs/PART
start_part() {
    local etcd=http://127.0.0.1:$((port + 1)) peer=http://127.0.0.1:$((port + 2)) pki=$run/pki command
    case $1 in
        etcd)
            command=(etcd --data-dir "$run/etcd" --unsafe-no-fsync --listen-client-urls "$etcd"
                --advertise-client-urls "$etcd" --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer"
                --initial-cluster "default=$peer")
            ;;
        api)
            # shellcheck disable=SC2054  # a comma within a word
            command=("$bin/kube-apiserver" --etcd-servers="$etcd" --bind-address="$node_ip" --secure-port="$port"
                --advertise-address="$node_ip" --endpoint-reconciler-type=none --allow-privileged=true
                --service-cluster-ip-range="10.219.$number.0/24" --authorization-mode=Node,RBAC
                --token-auth-file="$pki/tokens.csv" --client-ca-file="$pki/ca.crt"
                --tls-cert-file="$pki/api.crt" --tls-private-key-file="$pki/api.key"
                --kubelet-client-certificate="$pki/client.crt" --kubelet-client-key="$pki/client.key"
                --kubelet-certificate-authority="$pki/ca.crt" --kubelet-preferred-address-types=InternalIP
                --service-account-key-file="$pki/accounts.key"
                --service-account-signing-key-file="$pki/accounts.key"
                --service-account-issuer=https://kubernetes.default.svc
                # A pod that says nothing else is ended 5 s after its node is away, not 300 s.
                --default-not-ready-toleration-seconds=5 --default-unreachable-toleration-seconds=5)
            ;;
        scheduler)
            command=("$bin/kube-scheduler" --kubeconfig="$run/admin.kubeconfig" --leader-elect=false
                --bind-address=127.0.0.1 --secure-port=$((port + 3)) --port=0)
            ;;
        controllers)
            # A node that says nothing for 20 s is gone.
            command=("$bin/kube-controller-manager" --kubeconfig="$run/admin.kubeconfig" --leader-elect=false
                --bind-address=127.0.0.1 --secure-port=$((port + 4)) --port=0
                --controllers='*,-nodeipam,-route,-service,-cloud-node-lifecycle'
                --service-account-private-key-file="$pki/accounts.key" --root-ca-file="$pki/ca.crt"
                --node-monitor-period=2s --node-monitor-grace-period=20s
                --flex-volume-plugin-dir="$run/own/plugins")
            ;;
        containerd)
            command=(containerd --config "$run/containerd.toml")
            ;;
        kubelet)
            command=("$bin/kubelet" --config="$run/kubelet.json" --kubeconfig="$run/node.kubeconfig"
                --hostname-override="$node" --node-ip="$node_ip" --root-dir="$run/kubelet"
                --cert-dir="$run/kubelet/pki" --container-runtime=remote
                --container-runtime-endpoint="unix://$run/containerd.sock"
                --runtime-cgroups=/ --kubelet-cgroups=/)
            ;;
    esac
    # shellcheck disable=SC2016
    enter setsid --fork bash -c 'run=$1 part=$2; shift 2; echo $$ >"$run/pids/$part"; exec "$@" >>"$run/logs/$part" 2>&1' \
        kube-part "$run" "$1" "${command[@]}" </dev/null >/dev/null 2>&1
}

parts_run() {
    local file
    for file in "$run"/pids/*; do
        [[ ! -e $file ]] || signal_part "${file##*/}" 0 2>/dev/null || die "${file##*/} has ended"
    done
}

api_answers() {
    curl --silent --fail --max-time 2 --cacert "$run/pki/ca.crt" "https://$node_ip:$port/readyz"
}

# PART SIGNAL
signal_part() { enter kill "-$2" "$(<"$run/pids/$1")"; }

configure_node() {
    : >"$run/resolv.conf"
    cat >"$run/cni/10-bridge.conflist" <<END
{"cniVersion": "0.4.0", "name": "$bridge", "plugins": [{"type": "bridge", "bridge": "$bridge", "isGateway": true,
  "ipMasq": false, "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": "$run/cni/addresses",
  "ranges": [[{"subnet": "10.218.$number.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    cat >"$run/containerd.toml" <<END
version = 2
root = "$run/containerd/root"
state = "$run/containerd/state"
[grpc]
  address = "$run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "fgpu.local/pause:1"
  stream_server_port = "0"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$run/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    container_annotations = ["nvidia.cdi.k8s.io/*"]
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
      BinaryName = "$here/nvidia_runtime.py"
END
    cat >"$run/kubelet.json" <<END
{"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
 "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false},
  "x509": {"clientCAFile": "$run/pki/ca.crt"}},
 "authorization": {"mode": "AlwaysAllow"},
 "tlsCertFile": "$run/pki/kubelet.crt", "tlsPrivateKeyFile": "$run/pki/kubelet.key",
 "address": "$node_ip", "port": $((port + 5)), "readOnlyPort": 0,
 "healthzPort": $((port + 6)), "healthzBindAddress": "127.0.0.1",
 "cgroupDriver": "cgroupfs", "cgroupRoot": "/$cgroup", "enforceNodeAllocatable": ["pods"], "failSwapOn": false,
 "makeIPTablesUtilChains": false, "resolvConf": "$run/resolv.conf", "volumePluginDir": "$run/own/plugins",
 "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
 "imageGCHighThresholdPercent": 99, "imageGCLowThresholdPercent": 98,
 "nodeStatusUpdateFrequency": "4s", "syncFrequency": "2s", "maxPods": 60}
END
}

# --- Images ---------------------------------------------------------------------------------------

import_image() { ctr --address "$run/containerd.sock" --namespace k8s.io images import "$1" >>"$run/logs/images"; } # FILE

import_images() { # FILE...
    local image
    gcc -static -Os -Wall -o "$run/pause" "$here/pause.c"
    mkdir "$run/pause-image"
    tar -C "$run" -cf "$run/pause-image/layer.tar" pause
    printf '{"architecture": "%s", "os": "linux", "config": {"Entrypoint": ["/pause"]}, "rootfs": {"type": "layers",
      "diff_ids": ["sha256:%s"]}}' "$(dpkg --print-architecture)" \
        "$(sha256sum "$run/pause-image/layer.tar" | cut -d' ' -f1)" >"$run/pause-image/config.json"
    printf '[{"Config": "config.json", "RepoTags": ["fgpu.local/pause:1"], "Layers": ["layer.tar"]}]' \
        >"$run/pause-image/manifest.json"
    tar -C "$run/pause-image" -cf "$run/pause.tar" manifest.json config.json layer.tar
    for image in "$run/pause.tar" "$@"; do import_image "$image"; done
    image=fgpuspawner/base:0.1
    if command -v docker >/dev/null && docker image inspect "$image" >/dev/null 2>&1; then
        docker save "$image" | import_image -
    fi
}

# --- The commands ---------------------------------------------------------------------------------

up() { # IMAGE...
    bin=$("$here/build.sh") || die "Kubernetes is not built"
    # Of one that has crashed.
    clear_place
    run=$(mktemp -d "${TMPDIR:-/tmp}/fgpu-kube.$number.XXXXXX")
    chmod 755 "$run"
    printf '%s\n' "$run" >"$lock"
    trap give_up EXIT
    install_parts
    make_place
    make_keys
    make_tokens
    configure_node
    start_part etcd
    start_part containerd
    start_part api
    wait_for 60 containerd ctr --address "$run/containerd.sock" version
    import_images "$@"
    # On a busy machine it takes longer than the 10 s for which the controllers wait.
    wait_for 120 "the API" api_answers
    start_part scheduler
    start_part controllers
    start_part kubelet
    "$root/.venv/bin/python" "$here/kubeapi.py" "$run/admin.kubeconfig" "$READY_S" >"$run/pki/hub.token"
    (umask 077 && kubeconfig "$(<"$run/pki/hub.token")" >"$run/hub.kubeconfig")
    trap - EXIT
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit 0
fi
((EUID == 0)) || die "only root may run a cluster"
action=${1:-up}
shift || true
case $action in
    up)
        number="" env_file="" images=()
        while (($#)); do
            (($# >= 2)) || die "$1 needs a value"
            case $1 in
                --number) number=$2 ;;
                --env) env_file=$2 ;;
                --image) images+=("$2") ;;
                *) die "unknown argument '$1'; see $0 --help" ;;
            esac
            shift 2
        done
        if [[ -n $number ]]; then
            use_number "$number"
            take_lock 0 || die "cluster $number runs already: $run"
        else
            for candidate in $(seq "$LAST_NUMBER"); do
                use_number "$candidate"
                if take_lock 0; then break; fi
            done
        fi
        up "${images[@]}"
        assignments=$(printf 'FGPU_TEST_KUBE=%s\nFGPU_TEST_KUBECONFIG=%s' "$number" "$run/admin.kubeconfig")
        printf '%s\n' "$assignments"
        if [[ -n $env_file ]]; then printf '%s\n' "$assignments" >"$env_file"; fi
        ;;
    down)
        if (($# == 0)); then
            for file in /run/fgpu-kube-*; do
                if [[ -e $file ]]; then "$0" down "${file##*-}"; fi
            done
            exit 0
        fi
        use_number "$1"
        [[ -e $lock ]] || exit 0
        exec 9>>"$lock"
        clear_place
        rm -f "$lock"
        ;;
    import)
        (($# == 2)) || die "import N FILE"
        use_number "$1"
        import_image "$2"
        ;;
    freeze-* | thaw-* | stop-* | start-*)
        (($# == 1)) || die "$action N"
        use_number "$1"
        part=${action#*-}
        [[ $part =~ ^($PARTS)$ ]] || die "'$part' is none of $PARTS"
        case $action in
            freeze-*) signal_part "$part" STOP ;;
            thaw-*) signal_part "$part" CONT ;;
            stop-*) signal_part "$part" KILL ;;
            start-*)
                bin=$("$here/build.sh" --check)
                start_part "$part"
                ;;
        esac
        ;;
    *) die "unknown command '$action'; see $0 --help" ;;
esac
