"""Every tolerance of the tests, with the noise it was derived from.

Float32 carries 24 bits; a gradient is a sum of many terms that partly cancel (advantages add up to zero in a group), so
two orders of summation differ by about 1e-7 to 1e-6 of its norm. That is the noise floor of everything below.
"""

from grpo_ext.run.rounding import SAME_UPDATE

# Relative update error of the default mode in float32 (the promise). Measured over the matrix: up to 4e-6.
UPDATE = SAME_UPDATE

# Adam divides the gradient by the root of its second moment: an element whose gradient is itself rounding noise still
# moves by a whole learning rate. With TRL's default epsilon of 1e-8 one such element changes the update by 1e-5 to 1e-2
# (stock TRL in one process shows the same). The float32 matrix runs AdamW with this epsilon, well above the noise of a
# gradient element (about 1e-8); the default epsilon is tested in float64.
ADAM_EPSILON = 1e-4

# The same in float64 throughout with Adam's default epsilon: measured 1e-14, and 7e-12 for GPT-2, whose biases of
# keys have no gradient but rounding.
UPDATE_FLOAT64 = 1e-10

# Steps of SGD in float64 throughout, of completions that are cut into rows against whole ones: measured 1e-14.
CUT_FLOAT64 = 1e-12

# A run that has to differ does so by far more than rounding.
DIFFERENT = 1e-3

# |a - b| / max(1, |a|) of a logged value: float32 sums in another order. Measured: up to 1e-6.
METRIC = 1e-5

# The same two under bf16=True with a rollout that is not sampled again, where micro-batches cut groups: each part of a
# group runs the prompt's backward pass by itself, and its products round to 8 bits (2**-9 each), which the tiny models'
# steep random weights and AdamW enlarge. Whole groups are held to UPDATE and METRIC. Measured: 1e-2 to 6e-2, packs
# against padded batches the same; 2e-3 to 3e-3 with small random weights; another seed 1.4. A ratio that falls on the
# other side of the clip range is one token of twelve in a logged extreme (0.083); all else is within 3e-3.
UPDATE_BFLOAT16 = 1e-1
METRIC_BFLOAT16 = 1e-1

# Significance of a statistical test with a fixed seed: it either passes always or never, so this only says how unlikely
# the sample is under the right distribution.
P_VALUE = 1e-3

# A float64 forward or backward pass in two forms, norm of the difference over the norm. What is left is RMSNorm's
# float32: measured 1e-7. One token too many or too few moves a log-probability by 1e-3 and more. Models that do not run
# in float64 (grouped experts, eager soft-capping) are held to UPDATE: measured 2e-6.
SAME_ALGEBRA = 3e-7

# The same where everything is float64 (a model with LayerNorm, the language-model head alone). Measured: 1e-15.
FLOAT64_SUMS = 1e-13

# Output and gradients of an attention kernel in bfloat16 or float16 against float64, norm of the difference over the
# norm. bfloat16 carries 8 bits: rounding what goes in and comes out alone was measured at 1e-2; kernels round weights
# too. Gradients that miss the part of the log-sum-exp are off by 0.2 and more.
HALF_PRECISION_KERNEL = 3e-2

# The same of an output joined from two parts that each round once, in units of the type's epsilon. Rounding the exact
# output was measured at 0.20, the join in float32 at 0.24, a join in half precision at 0.27 (bfloat16, float16 0.28).
HALF_PRECISION_JOIN = 0.255

# Float32 sums of products in two orders, norm of the difference over the norm. Measured: 5e-7.
FLOAT32_SUMS = 2e-6

# Log-probabilities, entropies and gradients of a language-model head in float32 against float64, norm of the difference
# over the norm; terms of the entropy's gradient cancel. Measured on the CPU: 3e-6.
FLOAT32_HEAD = 1e-5
