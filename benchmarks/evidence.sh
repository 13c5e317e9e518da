#!/usr/bin/env bash
# Everything that is claimed of a GPU, in the order in which it matters: benchmarks against the installed peers, the
# GPU suite, accuracy, and compute-sanitizer over the suite. Results go to the folder $1 (default .bench); $2 names a
# part: logits, routers, experts, heads, parity, shards and expert-parallel (on several GPUs), trainers (which needs TRL), lm (Liger),
# decoder (PEFT), autotune (Liger or fla), versions (only where ONEPASS_BASELINE names a checkout of another version, against which this
# one is timed) or checks (default all).
# About 25 minutes on an H100, and 8 for versions. Without a .git here, say ONEPASS_COMMIT=<commit>; a baseline without
# one goes by its folder's name.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.bench}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
large=(--shape 8192x151936 --shape 8192x128256 --shape 16384x32000)
bench() { # command, options of which the last is the name
  "$python" -W ignore -m benchmarks "$1" --out "$out" "${@:2}" 2>&1 | tee "$out/${*: -1}.log"
}
part=${2:-all}
wants() { [[ $part == all || $part == "$1" ]]; }
frozen_or_not=(--op linear_cross_entropy --op linear_cross_entropy_frozen)

if wants logits; then
  bench logits --op log_probs_and_entropy --op cross_entropy --masked 0.5 --no-compile --no-peers --shape 8192x151936 --name half-masked
  bench logits --op cross_entropy --op log_probs_and_entropy --shape 64x151936 --milliseconds 100 --name few-rows
  bench logits --op log_probs_and_entropy --no-compile "${large[@]}" --name log-probs-entropy
  bench logits --op cross_entropy "${large[@]}" --name cross-entropy
  bench logits --op log_probs --op topk_kl_div --op topk_kl_div_renormalized --no-compile --shape 8192x151936 --name topk-distillation
  bench logits --op kl_div --op kl_div_reverse --op jsd --shape 4096x151936 --name kl-div
fi
if wants routers; then
  bench logits --op softmax_topk --op softmax_topk_uncounted --op sigmoid_topk --name routers
fi
if wants experts; then
  shapes=(--shape 8192x2048x768x128x8 --shape 8192x2048x512x512x10 --shape 8192x2880x2880x32x4 --shape 4096x4096x14336x8x2)
  bench experts --op experts_forward --op experts --op experts_lora --routing uniform "${shapes[@]}" --name experts
  quantized=(--op experts_nf4 --op experts_mxfp4 --op experts_fp8 --op experts_int8 --routing uniform)
  few_rows=(--shape 64x2048x768x128x8 --shape 512x2048x768x128x8 --shape 2048x2048x768x128x8)
  bench experts "${quantized[@]}" "${few_rows[@]}" --shape 8192x2048x768x128x8 --name experts-quantized
  bench experts --op experts_gpt_oss --shape 8192x2880x2880x32x4 --shape 512x2880x2880x32x4 --routing uniform --name experts-gpt-oss
fi
if wants heads; then
  small=(--shape 16384x896x151936 --shape 16384x1536x151936 --shape 8192x4096x151936 --shape 8192x4096x128256)
  bench heads --no-compile --op linear_cross_entropy --rounds 5 "${small[@]}" --name linear-head
  bench heads --no-compile --op linear_cross_entropy --rounds 5 --shape 32768x2048x151936 --shape 256x4096x128256 --shape 8192x2880x201088 --name linear-head-2
  bench heads --no-compile --op linear_log_probs_frozen --op linear_policy_loss --shape 8192x4096x151936 --name frozen-head
  bench heads --no-compile --op linear_dpo --op linear_cross_entropy_lora --op linear_cross_entropy_lora_frozen --shape 8192x4096x151936 --name adapters
  bench heads --no-compile "${frozen_or_not[@]}" --shape 32768x2048x151936 --no-peers --name linear-head-memory
  bench heads --no-compile "${frozen_or_not[@]}" --shape 32768x2048x151936 --no-peers --masked 0.5 --name linear-head-masked
fi
if wants parity; then
  bench heads --no-compile --op linear_cross_entropy_wide --op linear_log_probs_and_entropy_forward_wide --op linear_cross_entropy_invariant --op linear_log_probs_and_entropy_invariant --name parity-heads
  bench heads --no-compile --op linear_kl_div --shape 4096x4096x151936 --name parity-divergence
  bench logits --no-compile --no-peers --op log_probs_and_entropy_invariant --op log_probs_and_entropy --op log_probs_and_entropy_support --shape 8192x151936 --shape 512x151936 --name parity-logits
fi
if wants shards && [[ $("$python" -c "import torch; print(torch.cuda.device_count())") -gt 1 ]]; then
  bench shards --picture --name shards
  bench shards --processes 1 --no-peers --shape 8192x75968 --shape 8192x4096x75968 --name shards-of-one
fi
if wants expert-parallel && [[ $("$python" -c "import torch; print(torch.cuda.device_count())") -gt 1 ]]; then
  bench expert-parallel --processes 2 --name expert-parallel
fi
if wants trainers; then
  "$python" -W ignore -m benchmarks trainers --out "$out" 2>&1 | tee "$out/trainers.log" | tail -n 12
fi
if wants lm; then
  "$python" -W ignore -m benchmarks lm --out "$out" 2>&1 | tee "$out/lm.log" | tail -n 32
fi
if wants decoder; then
  "$python" -W ignore -m benchmarks decoder --model qwen3-30b-a3b --model gpt-oss-20b --model mixtral-8x7b --out "$out" 2>&1 | tee "$out/decoder.log" | tail -n 20
fi
if wants autotune; then
  "$python" -W ignore -m benchmarks autotune --out "$out" 2>&1 | tee "$out/autotune.log" | tail -n 12
fi
if wants versions && [[ -n ${ONEPASS_BASELINE:-} ]]; then
  "$python" -W ignore -m benchmarks versions --baseline "$ONEPASS_BASELINE" --out "$out" 2>&1 | tee "$out/versions.log"
fi
if wants checks; then
  "$python" -m pytest tests -m gpu -n 12 -v -p no:cacheprovider 2>&1 | tee "$out/tests.log" | tail -n 3
  "$python" tests/test_accuracy.py | tee "$out/accuracy.log" | tail -n 5
  # Kernels are compiled by now. Only ours are instrumented: torch's would take hours.
  kernels=()
  for part_of_name in softmax_ selected_ teacher_ rout divergence scale_kernel row_weight row_average support_ statistics_kernel merge_ grouped; do
    kernels+=(--kernel-name "kernel_substring=$part_of_name")
  done
  memcheck() { # name of the log, test files
    compute-sanitizer --tool memcheck "${kernels[@]}" "$python" -m pytest "${@:2}" -m gpu \
      -p no:cacheprovider -p no:xdist -k "not more_than_2_to_the_31" 2>&1 | tee "$out/memcheck-$1.log" | tail -n 3
  }
  memcheck losses tests/test_statistics.py tests/test_losses.py tests/test_softmax_loss.py tests/test_distillation.py tests/test_kl_div.py
  memcheck border tests/test_border*.py tests/test_guard.py tests/test_defects_*.py
  memcheck supports tests/test_support.py tests/test_row_temperature.py tests/test_linear_statistics.py
  memcheck experts tests/test_routing*.py tests/test_experts.py tests/test_scattered.py
fi
