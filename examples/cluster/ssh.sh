#!/bin/bash
# usage: ./ssh.sh NODE...     one controller here, WORKERS_PER_NODE workers on each node, ranks in the order of the nodes.
#
# runflat must be on the path of all nodes, and RUN on a file system that all see.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,4p' "$0"; exit 2; }
RUN=${RUN:-$PWD/runs/ssh-$(date +%Y%m%d-%H%M%S)}
CONFIG=${CONFIG:-job.toml}
WORKERS_PER_NODE=${WORKERS_PER_NODE:-8}
LAYOUT=${LAYOUT:---layout.tp 8 --layout.replicas 2 --spares 8 --on-failure spare,ntp,drop}
LISTEN=${LISTEN:-$(hostname)}

mkdir -p "$RUN"
# shellcheck disable=SC2086  # several flags
runflat controller "$CONFIG" $LAYOUT --run "$RUN" --listen "$LISTEN" &
controller=$!
trap 'kill "$controller" 2>/dev/null || true' EXIT

rank=0
for node in "$@"; do
  # One connection per node. When it breaks, -tt ends what it started; start this line again by hand to bring a node back.
  command="trap 'kill 0' HUP TERM; "
  for ((local_rank = 0; local_rank < WORKERS_PER_NODE; local_rank++)); do
    command+="(until RANK=$rank LOCAL_RANK=$local_rank runflat worker --run '$RUN' --node '$node'; do sleep 5; done) & "
    rank=$((rank + 1))
  done
  ssh -tt -o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "$node" "$command wait" </dev/null &
done

if wait "$controller"; then code=0; else code=$?; fi
trap - EXIT
[ "$code" -eq 0 ] || jobs -p | xargs -r kill 2>/dev/null || true
wait || true
exit "$code"
