"""From logits to a token: the same chain twice, on the host in numpy and on the device in MLX.

The steps and their order are those of toast-sample(1): 1 guard, 2 bias, 3 penalties and bans, 4
log-softmax, 5 top-p, 6 min-p, 7 typical-p, 8 XTC, 9 top-k, 10 draw; each is skipped while its
option has its off value. As in `mlx_lm.sample_utils`, top-p keeps ties with its last id; here top-k
does too, so that the survivors do not depend on how a device partitions.

Steps 5-10 work on `logit - max(logit)` instead of log-probabilities. The two differ by a constant
that no step sees, and the first is the same float32 number on every device. The noise of step 10
comes from Threefry-2x32 keyed by (seed, position), so any position can be drawn again, in any
order, by either sampler.
"""
