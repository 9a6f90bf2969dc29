#!/usr/bin/env bash
# One model over the GPUs of two machines, by torchrun. On the machine you sit at (node 0), with its address as the
# other one can reach it, and behind that what k3 is to do:
#
#   examples/two_nodes.sh 0 10.0.0.1 chat --model /models/kimi-k3 --session work -p "Where were we?"
#
# and on the other one (node 1) the same address and nothing else, since ranks above 0 are told what to do:
#
#   examples/two_nodes.sh 1 10.0.0.1
#
# Neither begins before the other is there. Both need the same k3, torch and number of GPUs, and the model under the
# same path, on a disk of their own or a shared one. Sessions are node 0's alone, and go on with any number of GPUs.
#
#   RANKS   ranks on each machine (default: its GPUs). The sum must divide the model: 2, 4, 8, 16 or 32 for a K3
#   PORT    a free port of node 0 (default: 29511)
#   IFACE   network interface between the two (default: the one that the route to node 0 takes)
#   PYTHON  the python that has k3 (default: python3)
set -euo pipefail
node=${1:?0 on the machine you sit at, 1 on the other} address=${2:?the address of node 0}
shift 2

ranks=${RANKS:-$(nvidia-smi -L | wc -l)}
if [[ -z ${IFACE:-} ]]; then
    # "... dev eth0 ..." of the route; an address of this machine itself is reached over lo, which the other can't use.
    route=$(ip -o route get "$address" 2>/dev/null || true)
    IFACE=$(sed -n 's/.* dev \([^ ]*\).*/\1/p' <<<"$route")
    if [[ $IFACE == lo && $address != 127.* && $address != localhost ]]; then
        IFACE=$(ip -o addr show to "$address" | awk '{print $2; exit}')
    fi
    [[ $address == 127.* || $address == localhost ]] && IFACE=lo
fi
# Calls go over gloo, tensors between GPUs over NCCL, which picks InfiniBand by itself where there is some.
[[ -n ${IFACE:-} ]] && export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE

exec "${PYTHON:-python3}" -m torch.distributed.run \
    --nnodes 2 --node-rank "$node" --nproc-per-node "$ranks" \
    --master-addr "$address" --master-port "${PORT:-29511}" \
    -m k3cli "$@"
