#!/usr/bin/env bash
# Ray and the job scheduler on bare hosts, which this host reaches over ssh.
#   ROLLOUT_HOSTS="r1 r2 r3 r4" TRAIN_HOSTS="t1 t2" examples/jobs-on-ray/hosts.sh examples/jobs-on-ray/cluster.yaml
# Submit jobs after `. ./rose-channel.sh`, which has the channel's password.
# Who reaches this Ray can run commands on all hosts: use a network that only trusted people reach.
set -euo pipefail

cluster=$1
head=$(hostname -I | cut -d' ' -f1)

password=$(openssl rand -hex 24)
printf 'requirepass %s\n' "$password" |
  redis-server - --daemonize yes --bind "$head" --port 6380 --appendonly yes --appendfsync always
export ROSE_CHANNEL="redis://:$password@$head:6380/0"
(umask 077 && echo "export ROSE_CHANNEL=$ROSE_CHANNEL" > rose-channel.sh)
export RAY_health_check_period_ms=500  # a dead node is noticed within 3 s
# Jobs go on for an hour while the head is away: start it again with this command.
RAY_REDIS_ADDRESS="$head:6380" ray start --head --redis-password "$password" \
  --system-config '{"gcs_rpc_server_reconnect_timeout_s": 3600}' \
  --node-ip-address "$head" --port 6379 --num-gpus 0
for host in $ROLLOUT_HOSTS; do
  ssh "$host" "ray start --address $head:6379 --num-gpus 8 --resources '{\"h20\": 1}'"
done
for host in $TRAIN_HOSTS; do
  ssh "$host" "ray start --address $head:6379 --num-gpus 8 --resources '{\"h800\": 1}'"
done
exec rose sched serve "$cluster" --http 8200
