#!/usr/bin/env bash
# A tool loop: the model calls tools, this script runs them and hands the results back, until the model answers.
#
#   examples/tool_loop.sh ["Add 1234 and 5678"]       needs jq; K3=path/to/k3 if it is not on the PATH
set -euo pipefail
k3=${K3:-k3}
command -v jq >/dev/null || { echo "tool_loop.sh: jq is needed to read k3's events" >&2 && exit 1; }

# A home of its own, so that trying this leaves nothing behind. Without these two lines the session stays.
K3_HOME=$(mktemp -d) && export K3_HOME
trap 'rm -rf "$K3_HOME"' EXIT
[[ $k3 == */* ]] && k3=$(realpath "$k3") # a relative path means the folder we are leaving now
cd "$K3_HOME"

cat >tools.json <<'JSON'
[{"type": "function", "function": {
  "name": "add", "description": "Add two numbers.",
  "parameters": {"type": "object", "required": ["a", "b"],
                 "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}},
 {"type": "function", "function": {
  "name": "get_time", "description": "Get the current time.", "parameters": {"type": "object", "properties": {}}}}]
JSON

run_tool() { # name, arguments (JSON) -> the result on stdout
    case $1 in
        add) jq -r '.a + .b' <<<"$2" ;;
        get_time) date '+{"time": "%H:%M"}' ;;
        *) echo "there is no tool $1" ;;
    esac
}

ask=(-p "${1:-Add 1234 and 5678}")
for _ in 1 2 3 4 5; do
    "$k3" chat --session loop --tools tools.json --temperature 0 --max-tokens 300 --json "${ask[@]}" >events
    jq -j 'select(.type == "text").text' events
    if ! jq -es 'any(.type == "tool_call")' events >/dev/null; then
        echo
        exit 0
    fi
    jq -c 'select(.type == "tool_call")' events | while read -r call; do
        name=$(jq -r .name <<<"$call")
        result=$(run_tool "$name" "$(jq -r .arguments <<<"$call")")
        echo "tool $name: $result" >&2
        jq -c --arg content "$result" '{id, $content}' <<<"$call"
    done | jq -s . >results.json
    ask=(--tool-result results.json)
done
echo "tool_loop.sh: five rounds of tool calls without an answer" >&2
exit 1
