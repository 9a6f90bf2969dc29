#!/usr/bin/env bash
# A chat that is left and resumed: three processes, one conversation, nothing evaluated twice.
#
#   examples/resume.sh              K3=path/to/k3 if it is not on the PATH
set -euo pipefail
k3=${K3:-k3}

# A home of its own, so that trying this leaves nothing behind. Without these two lines the session stays.
K3_HOME=$(mktemp -d) && export K3_HOME
trap 'rm -rf "$K3_HOME"' EXIT

ask() { # session, prompt -> the answer on stdout; the rest of k3's notes stays on stderr
    "$k3" chat --session "$1" --temperature 0 --max-tokens 200 -p "$2"
}

ask notes "Remember that the deploy key is K7-4411-QX."
ask notes "What is a checkpoint?"
# The note on stderr says how many tokens were reused: all of the history.
ask notes "What is the deploy key?"

echo "--- turns"
"$k3" log notes
echo "--- the same again, compared token by token and bit by bit"
"$k3" replay notes
