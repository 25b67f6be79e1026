#!/usr/bin/env bash
# Makes .venv, with everything that `make demo` and `make test` need.
#
# Owns: .venv (the environment) and .venv-uv (uv, where the machine has none).
# Promises: names every missing system package with the command that installs it, and runs that command itself
# as root on Debian; a second run does nothing until one of its inputs changes.
# Never: touches anything outside the checkout, system packages aside.
#
#   PYTHON   the interpreter to build .venv from (default: the first of python3, python3.13 ... that fits)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

EXTRAS="cpu,mooncake,train,cluster,redis,otel,ray,docs,dev"
STAMP=".venv/.rose-stamp"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

# --- which Python ------------------------------------------------------------------------------------------
fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
        if fits "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        [ "${PYTHON:-}" != "$candidate" ] || fail "PYTHON=$PYTHON is not Python 3.11, 3.12 or 3.13"
    done
}

# --- what this .venv was made from ---------------------------------------------------------------------------
fingerprint() {
    {
        echo "$EXTRAS" "$PWD"
        "$1" -VV
        find pyproject.toml setup.py csrc .ci/bootstrap.sh .ci/overrides.txt -type f -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum
}

is_current() {
    [ -x .venv/bin/python ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$1" ] &&
        .venv/bin/python -c 'import rose._shm, rose._vmm, rose._delta' 2>/dev/null
}

# --- system packages -----------------------------------------------------------------------------------------
has_library() {
    # ldconfig is in /sbin, which is not on every user's PATH. No pipe into grep -q: it closes the pipe early,
    # and pipefail would call that a missing library.
    local known
    known="$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null)"
    [[ "$known" == *"$1 ("* ]]
}

has_headers() {
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
}

has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# Sets `required` and `optional` to the Debian packages that are missing. $1: the interpreter, or empty.
probe_system() {
    required=()
    optional=()
    if [ -z "$1" ]; then
        required+=(python3 python3-dev python3-venv)
    else
        local package
        package="python$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        has_headers "$1" || required+=("$package-dev")
        command -v uv >/dev/null || [ -x .venv-uv/bin/uv ] || has_venv "$1" || required+=("$package-venv")
    fi
    command -v g++ >/dev/null || required+=(g++)
    has_library libnuma.so.1 || required+=(libnuma1) # vLLM's CPU kernels link to it, Mooncake does too
    has_library libibverbs.so.1 || optional+=(libibverbs1)
    has_library librdmacm.so.1 || optional+=(librdmacm1)
    has_library libcurl.so.4 || optional+=(libcurl4)
    has_library libnl-3.so.200 || optional+=(libnl-3-200)
    has_library liburing.so.2 || optional+=(liburing2)
    command -v redis-server >/dev/null || optional+=(redis-server)
    command -v aarch64-linux-gnu-g++ >/dev/null || optional+=(g++-aarch64-linux-gnu) # these two run the delta
    command -v qemu-aarch64 >/dev/null || optional+=(qemu-user)                      # codec on ARM in its tests
    command -v chromium >/dev/null || optional+=(chromium)               # these two open the dashboard in its
    command -v chromedriver >/dev/null || optional+=(chromium-driver)    # tests
}

can_install() { [ "$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }

apt_install() {
    say "installing system packages: $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" </dev/null >&2
}

install_system_packages() {
    local required optional
    probe_system "$1"
    [ $((${#required[@]} + ${#optional[@]})) -gt 0 ] || return 0
    if can_install; then
        DEBIAN_FRONTEND=noninteractive apt-get update -q </dev/null >&2 || say "apt-get update failed; trying anyway"
        [ ${#required[@]} = 0 ] || apt_install "${required[@]}" || true
        local package # one by one: a name that this release lacks must not take the others along
        for package in ${optional[@]+"${optional[@]}"}; do apt_install "$package" || true; done
        probe_system "$(find_python)"
    fi
    if [ ${#optional[@]} -gt 0 ]; then
        say "system packages are missing, so some tests will be skipped, and without libraries Mooncake's relay"
        say "makes way for the embedded one; to change that:"
        say "    sudo apt-get install -y ${optional[*]}"
    fi
    if [ ${#required[@]} -gt 0 ]; then
        say "missing system packages; install them and run this again:"
        say "    sudo apt-get install -y ${required[*]}"
        exit 1
    fi
}

# --- package registries --------------------------------------------------------------------------------------
# uv doesn't read pip's configuration. A machine set up for pip (a mirror, a wheel folder) works with this too.
pip_setting() {
    local value
    value="$("$1" -m pip config list 2>/dev/null | sed -n "s/^\(global\|install\|user\|:env:\)\.$2='\(.*\)'\$/\2/p" |
        tail -n 1)" || true
    printf '%s' "${value//\\n/ }"
}

configure_registries() {
    local index extra links
    if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
        index="${PIP_INDEX_URL:-$(pip_setting "$1" index-url)}"
        [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    fi
    if [ -z "${UV_FIND_LINKS:-}" ]; then
        links="${PIP_FIND_LINKS:-$(pip_setting "$1" find-links)}"
        # uv splits at commas where pip splits at spaces.
        [ -z "$links" ] || export UV_FIND_LINKS="${links// /,}"
    fi
    if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "${PIP_CERT:-}" ]; then
        export SSL_CERT_FILE="$PIP_CERT"
    fi
    # A wheel folder is taken to hold PyTorch's CPU build; PyPI has only the CUDA build, which is 20 times
    # larger. Only PyTorch's own packages come from its index.
    if [ -z "${UV_FIND_LINKS:-}${UV_TORCH_BACKEND:-}" ]; then
        export UV_TORCH_BACKEND=cpu
        say "PyTorch's CPU build comes from its own index"
    fi
}

# --- the environment -----------------------------------------------------------------------------------------
find_uv() {
    if command -v uv >/dev/null; then
        command -v uv
        return
    fi
    if [ ! -x .venv-uv/bin/uv ]; then
        say "installing uv into .venv-uv"
        "$1" -m venv --clear .venv-uv >&2
        .venv-uv/bin/python -m pip install -q uv >&2
    fi
    echo "$PWD/.venv-uv/bin/uv"
}

make_environment() {
    local python="$1" uv
    uv="$(find_uv "$python")"
    configure_registries "$python"
    if [ ! -x .venv/bin/python ] || ! [ "$(.venv/bin/python -VV)" = "$("$python" -VV)" ]; then
        "$uv" venv -q --clear --python "$python" .venv
    fi
    say "installing vllm-rose[$EXTRAS] into .venv"
    # Compiled here, once: an engine starts three times as fast, also where the environment forbids Python to
    # keep what it compiles.
    "$uv" pip install --compile-bytecode --python .venv/bin/python --override .ci/overrides.txt -e ".[$EXTRAS]"
}

main() {
    local python wanted
    mkdir -p .venv-uv
    exec 9>.venv-uv/lock
    flock 9 # `make demo` and `make test` may be started side by side
    python="$(find_python)"
    if [ -n "$python" ]; then
        wanted="$(fingerprint "$python")"
        ! is_current "$wanted" || return 0
    fi
    install_system_packages "$python"
    python="$(find_python)"
    [ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 found; set PYTHON to one"
    rm -f "$STAMP"
    make_environment "$python"
    wanted="$(fingerprint "$python")"
    printf '%s\n' "$wanted" >"$STAMP"
    is_current "$wanted" || fail "the C++ extensions don't load; see .venv/bin/python -m rose.doctor"
    say "done"
}

main
