#!/usr/bin/env bash
# Subagents: what is known is evaluated once; each question is answered by a fork of it, side by side, and the answers
# come back into the parent session.
#
#   examples/subagents.sh           K3=path/to/k3 if it is not on the PATH
set -euo pipefail
k3=${K3:-k3}
questions=(
    "What is the port of the staging server?"
    "What is the checksum of the release?"
    "What is the path of the log file?"
)

# A home of its own, so that trying this leaves nothing behind. Without these two lines the sessions stay.
K3_HOME=$(mktemp -d) && export K3_HOME
trap 'rm -rf "$K3_HOME"' EXIT

"$k3" chat --session lead --temperature 0 --max-tokens 200 -p "Remember: the port of the staging server is 8471, \
the checksum of the release is 9f31c07a, and the path of the log file is /var/log/atlas/build.log."

# --ephemeral: such a fork answers and leaves nothing on disk. With a name instead, it would stay as a session.
for number in "${!questions[@]}"; do
    "$k3" fork lead --ephemeral --temperature 0 --max-tokens 200 -p "${questions[number]}" \
        >"$K3_HOME/answer.$number" 2>"$K3_HOME/notes.$number" &
    agents[number]=$!
done

report="Reports of the subagents:"
for number in "${!questions[@]}"; do
    wait "${agents[number]}" || { cat "$K3_HOME/notes.$number" >&2 && exit 1; }
    grep "reused" "$K3_HOME/notes.$number" >&2
    echo "subagent $number: $(<"$K3_HOME/answer.$number")"
    report+=$'\n'"- ${questions[number]} $(<"$K3_HOME/answer.$number")"
done

"$k3" resume lead --temperature 0 --max-tokens 200 -p "$report"
