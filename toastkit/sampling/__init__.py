"""From logits to a token: the same chain twice, on the host in numpy and on the device in MLX.

The chain, in order (each step is skipped while its option has its off value):

 1. guard            NaN -> 0, +inf -> 1e4, -inf -> -1e4, always (paper 003 section 10.1)
 2. logit bias       added to the logits
 3. penalties        repetition, presence, frequency, over the last `penalty_context` ids of
                     prompt and answer (the first two once per id, the last per occurrence);
                     then bans, -inf, which no penalty would change
 4. log-softmax      the log-probability that is reported and that `top` lists
 5. top-p            keeps ids while the mass above them is under top_p of the whole
 6. min-p            keeps ids with at least min_p of the best one's probability
 7. typical-p        keeps the ids nearest to the entropy, up to that mass (renormalised)
 8. XTC              with xtc_probability, drops all but the least of the ids over the threshold
 9. top-k            keeps the k most likely; whatever ties with the k-th stays too
10. draw             argmax of log-probability / temperature + Gumbel noise

At temperature 0 the draw is the argmax after step 3 (the lowest id among equals); 5-9 do nothing.
Order and meaning follow `mlx_lm.sample_utils`, which has no steps 1 and 7. As there, top-p keeps
what ties with its last id; top-k does so here, too, so that the survivors do not depend on how a
device happens to partition.

Steps 5-10 work on `logit - max(logit)` instead of log-probabilities. The two differ by a constant
that no step sees, and the first is the same float32 number on every device.

The noise of step 10 comes from Threefry-2x32 keyed by (seed, position), so any position can be
drawn again, in any order, by either sampler: see `toastkit.sampling.threefry`.

    sampling_options.py    SamplingOptions: the fields, their legal intervals, their off values
    threefry.py            the counter-based generator, bit for bit that of mx.random.uniform
    filters.py             steps 5-9 as functions from float32 values to a threshold or a mask
    host.py                HostSampler, Draw: numpy
    device_sampler.py      DeviceSampler, DeviceDraw: MLX, lazy; the only one that imports mlx
"""
