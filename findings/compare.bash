# For the scripts of this folder: `install PACKAGE...`, then `compare COMMAND...`, which runs the
# program on descriptor 3, in $folder/program.py, and compares what it prints with standard input.
# $python is the interpreter with the packages. Nothing stays behind.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$folder/venv/bin/python

install() {
    "${PYTHON:-python3}" -m venv "$folder/venv"
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
    echo "$(basename "$0" .sh): $*"
}

compare() {
    cat <&3 >"$folder/program.py"
    cat >"$folder/expected"
    (cd "$folder" && "$@" >seen 2>errors) || { cat "$folder/errors"; exit 1; }
    diff --label "as it was" --label "as it is now" -u "$folder/expected" "$folder/seen" || exit 1
    cat "$folder/seen"
}
