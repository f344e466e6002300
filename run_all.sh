#!/usr/bin/env bash
# Train with every configuration in turn, then compare them. ./run_all.sh --help explains.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
root="$here/"
[ "$here" = "$PWD" ] && root="" # the logs then say configs/baseline.json

usage() {
  cat <<'TEXT'
Usage: ./run_all.sh [--num_gpus N] [--configs "A.json B.json"] [--log_dir DIR] [any option of train.py]

Runs train.py with each DeepSpeed configuration in turn through the deepspeed launcher, then gather_memory.py.

  --num_gpus N       GPUs of this machine to use (default: 1); without a GPU, that many CPU processes
  --configs "A B"    configurations to run (default: baseline, bf16_master_wg, bf16_full and, where torchao is installed,
                     bf16_full_sr of configs/); a path with spaces only by itself
  --log_dir DIR      where the logs go (default: logs/<timestamp>)
  --timeout SECONDS  end a configuration that runs longer, compiling included; the table then says TIMEOUT, and the
                     sweep goes on
  --hostfile FILE    several nodes: DeepSpeed's hostfile, "host slots=N" a line; --num_gpus is then GPUs of each node
  --help             this text
  anything else      is given to train.py as it is: see python train.py --help

Written to the log folder: <config>.log, <config>_loss.csv, the comparison in summary.txt and, where matplotlib is
installed, memory.png and loss.png.
A configuration that fails does not stop the others; it is named at the end, and the exit status is 1.
Ctrl-C ends all processes (exit status 130). Each run takes a free port, so two sweeps can run side by side.

Without a GPU a small preset is used, of 55 million parameters, which takes three to ten minutes on two cores (and some
more on the first run, for building DeepSpeed's operators). Its memory is the processes' resident memory.
Options that you give win over the preset.
TEXT
}

die() {
  echo "run_all.sh: error: $1" >&2
  exit 2
}

num_gpus=""
hostfile=""
timeout_s=""
configs=()
whole='^[1-9][0-9]{0,8}$'
log_dir=""
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --num_gpus=* | --configs=* | --log_dir=* | --timeout=* | --hostfile=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --num_gpus | --configs | --log_dir | --timeout | --hostfile)
      [ $# -ge 2 ] || die "$1 needs a value (see --help)"
      case "$1" in
        --num_gpus)
          [[ "$2" =~ $whole ]] || die "--num_gpus '$2' is not a whole number of at least 1"
          num_gpus=$2
          ;;
        --configs)
          if [ -f "$2" ]; then configs=("$2"); else read -r -d '' -a configs <<<"$2" || true; fi
          [ "${#configs[@]}" -gt 0 ] || die "--configs is empty; give at least one DeepSpeed JSON"
          ;;
        --log_dir) log_dir=$2 ;;
        --timeout)
          [[ "$2" =~ $whole ]] || die "--timeout '$2' is not a whole number of at least 1 second"
          timeout_s=$2
          ;;
        --hostfile)
          [ -f "$2" ] || die "--hostfile: no file $2"
          hostfile=$2
          ;;
      esac
      shift 2
      ;;
    --loss_log_file* | --memory_log_file* | --memory_snapshot* | --deepspeed_config* | --estimate)
      die "$1 is for train.py itself: each configuration of a sweep would need its own"
      ;;
    *.json) die "'$1' stands by itself; several configurations go in quotes: --configs \"A.json B.json\"" ;;
    *) options+=("$1") && shift ;;
  esac
done

[ -n "$num_gpus" ] || [ -n "$hostfile" ] || num_gpus=1
installed() { python3 -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$1'))"; }
if [ "${#configs[@]}" -eq 0 ]; then
  configs=("${root}configs/baseline.json" "${root}configs/bf16_master_wg.json" "${root}configs/bf16_full.json")
  if installed torchao; then configs+=("${root}configs/bf16_full_sr.json"); fi
fi
for config in "${configs[@]}"; do [ -f "$config" ] || die "--configs: no file $config"; done
names=$(basename -as .json "${configs[@]}")
[ -z "$(sort <<<"$names" | uniq -d)" ] || die "--configs: two files share the name $(sort <<<"$names" | uniq -d | head -n 1)"
command -v deepspeed >/dev/null || die "deepspeed is not on PATH; activate the environment of requirements.txt"

# The last line, since DeepSpeed prints warnings before it: the accelerator's name and how many there are.
read -r accelerator count < <(python3 -c "
from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()
print(accelerator.device_name(), accelerator.device_count())" 2>/dev/null | tail -n 1) ||
  die "python3 cannot import deepspeed; install requirements.txt"
preset=()
if [ "$accelerator" = cpu ]; then
  preset=(--hidden_dim 768 --num_layers 6 --num_heads 12 --vocab_size 8192 --batch_size 2 --seq_length 128
    --num_steps 15 --warmup_steps 3)
elif [ -z "$hostfile" ] && [ "$num_gpus" -gt "$count" ]; then
  die "--num_gpus $num_gpus: this machine has $count"
fi
# A wrong option ends the sweep here, with train.py's own line, and not each configuration after its start.
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" python3 -c "import train; train.get_args()" \
  --deepspeed_config "${configs[0]}" "${preset[@]}" "${options[@]}" || exit 2

if [ -z "$log_dir" ]; then # a folder of its own, also beside a sweep that started in the same second
  mkdir -p "$here/logs" 2>/dev/null || die "$here/logs cannot be made; give --log_dir"
  first="${root}logs/$(date +%Y%m%d_%H%M%S)"
  log_dir=$first
  for i in $(seq 2 99); do mkdir "$log_dir" 2>/dev/null && break || log_dir=${first}_$i; done
fi
mkdir -p "$log_dir" 2>/dev/null && [ -w "$log_dir" ] || die "--log_dir $log_dir cannot be written"
if [ "$accelerator" = cpu ]; then
  echo "No GPU found: running on the CPU, with this preset where you give no other value: ${preset[*]}"
  echo "DeepSpeed's operators, where they are not there yet, compile in silence, for a minute or two each."
fi

set -m # each run is a process group of its own, so that one signal reaches all its processes
job=""
end_job() {
  kill -TERM -- "-$job" 2>/dev/null || true
  for _ in $(seq 50); do
    kill -0 -- "-$job" 2>/dev/null || break
    sleep 0.2
  done
  kill -KILL -- "-$job" 2>/dev/null || true
}
stop() {
  trap - INT TERM HUP
  if [ -n "$job" ]; then end_job; fi
  echo "run_all.sh: interrupted; logs so far are in $log_dir" >&2
  exit 130
}
trap stop INT TERM HUP

where=()
[ -z "$num_gpus" ] || where+=(--num_gpus "$num_gpus")
[ -z "$hostfile" ] || where+=(--hostfile "$hostfile")
failed=()
for config in "${configs[@]}"; do
  name=$(basename "$config" .json)
  port=$(python3 -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
  echo "== $name =="
  (
    set -o pipefail # tee must not hide that the run failed
    deepspeed "${where[@]}" --master_port "$port" "${root}train.py" "${preset[@]}" "${options[@]}" \
      --loss_log_file "$log_dir/${name}_loss.csv" --deepspeed_config "$config" 2>&1 |
      tee "$log_dir/$name.log"
  ) </dev/null &
  job=$!
  start=$SECONDS
  while [ -n "$timeout_s" ] && kill -0 "$job" 2>/dev/null; do
    if [ $((SECONDS - start)) -ge "$timeout_s" ]; then
      end_job
      echo "FAILED: config=${name// /%20} reason=TIMEOUT limit_s=$timeout_s" | tee -a "$log_dir/$name.log"
      break
    fi
    sleep 0.5
  done
  wait "$job" || failed+=("$name")
  job=""
done
trap - INT TERM HUP

echo
plot=()
if installed matplotlib; then plot=(--plot); fi
python3 "${root}gather_memory.py" --log_dir "$log_dir" "${plot[@]}" || failed+=("gather_memory.py")
echo "Logs: $log_dir"
if [ "${#failed[@]}" -gt 0 ]; then
  echo "run_all.sh: FAILED: ${failed[*]}; see the logs in $log_dir" >&2
  exit 1
fi
