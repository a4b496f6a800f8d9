#!/usr/bin/env bash
# Envoy's life in a container: started, asked whether it is ready, drained. Needs bash and coreutils alone (the image has no curl).
#
#   envoy.sh run [ENVOY'S FLAGS]   starts Envoy; at SIGTERM or SIGINT drains it, then ends it. The container's entrypoint.
#   envoy.sh ready                 exit code 0 while it takes new connections. A HEALTHCHECK, or an exec probe.
#
# The drain: /ready fails at once, and responses ask clients to connect anew (HTTP/1.1 connection: close, HTTP/2 GOAWAY); after
# ENVOY_DRAIN_DELAY seconds, which balancers have to notice, it stops listening; when no request is running any more, at most
# ENVOY_DRAIN_TIMEOUT seconds later, it ends. Give whoever sends SIGKILL (stop_grace_period, terminationGracePeriodSeconds) more
# than the sum of both.
set -uo pipefail

config=${ENVOY_CONFIG:-/etc/envoy/envoy.yaml}
admin_port=${ENVOY_ADMIN_PORT:-9901}
drain_delay=${ENVOY_DRAIN_DELAY:-2}
drain_timeout=${ENVOY_DRAIN_TIMEOUT:-60}

say() { printf '{"service":"envoy","event":"%s"}\n' "$1"; }

# admin METHOD PATH: prints the answer, headers included. Fails when nobody answers, or with anything but 200.
admin() {
  local answer
  exec 3<>"/dev/tcp/127.0.0.1/$admin_port" || return 1
  printf '%s %s HTTP/1.1\r\nhost: admin\r\ncontent-length: 0\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  answer=$(timeout 5 cat <&3)
  exec 3>&-
  printf '%s' "$answer"
  [[ $answer == "HTTP/1.1 200"* ]]
} 2>/dev/null

# The requests that run at the edge and between gateways and tokenizers.
running() {
  local total=0 line
  while read -r line; do
    [[ $line =~ ^http\.(edge|tokenizers)\.downstream_rq_active:\ ([0-9]+) ]] && ((total += BASH_REMATCH[2]))
  done < <(admin GET '/stats?filter=downstream_rq_active$' | tr -d '\r')
  printf '%s' "$total"
}

drain() {
  trap '' TERM INT
  say "draining"
  admin POST /healthcheck/fail >/dev/null
  sleep "$drain_delay"
  admin POST '/drain_listeners' >/dev/null
  local deadline=$((SECONDS + drain_timeout)) left
  while kill -0 "$envoy" 2>/dev/null && left=$(running) && ((left > 0)); do
    if ((SECONDS >= deadline)); then
      say "the time to drain is over, running requests: $left"
      break
    fi
    sleep 0.2
  done
  say "drained"
  kill -TERM "$envoy" 2>/dev/null
}

run() {
  # Without hot restart it needs no shared memory, and several may run on one machine.
  # The access log is written once a second (ten by default).
  local flags=(-c "$config" --disable-hot-restart --file-flush-interval-msec 1000)
  [[ -n ${ENVOY_CONCURRENCY:-} ]] && flags+=(--concurrency "$ENVOY_CONCURRENCY")
  envoy "${flags[@]}" "$@" &
  envoy=$!
  trap drain TERM INT
  # A signal ends `wait` early: what is left to wait for is Envoy itself.
  wait "$envoy"
  while kill -0 "$envoy" 2>/dev/null; do wait "$envoy"; done
  wait "$envoy"
}

case ${1:-run} in
  run) run "${@:2}" ;;
  ready) admin GET /ready >/dev/null ;;
  *) echo "usage: envoy.sh run [flags] | ready" >&2; exit 2 ;;
esac
