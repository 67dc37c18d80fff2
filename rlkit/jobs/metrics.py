"""The names in metrics.jsonl: what each says, and its axis label with the unit.

Beside them stand ``reward_<name>``, the mean of a further number that a reward function of one's own gives,
in steps in which every response has it.
"""

# name | axis label | meaning; an indented line goes on with the one above it
_TABLE = """\
step | step | updates of the policy so far, counted in rollout batches; row k is about rollout k
  and the update from it
loss | loss | the surrogate whose gradient was followed; its value says little, and is about 0 on-policy
  at the start
grad_norm | gradient norm | length of the gradient before clipping (mean over the step's optimizer steps)
token_entropy | entropy (nats / token) | mean entropy of the next-token distributions at the response
  tokens, nats; with vLLM, of the rows used only
reward | train reward (share right) | mean reward of the rollouts: share that is well-formed and right
format_reward | train format (share) | share of the rollouts that is well-formed
answer_reward | train answer (share) | share of the rollouts whose answer is right
pass_at_k | pass@G (share of prompts) | share of prompts with at least one right response among the group's k
groups_all_right | groups all right (prompts) | prompts whose responses are all right (no signal with a mean
  baseline)
groups_all_wrong | groups all wrong (prompts) | prompts whose responses are all wrong (no signal)
groups_mixed | groups mixed (prompts) | prompts whose responses' rewards differ, which the gradient comes from
distinct_answers | distinct answers / group | mean number of different extracted answers per prompt, as
  texts; all its responses without an answer count as one
prompts_asked | prompts asked | with resamples: prompts that were sampled from, those that gave way included
groups_identical | groups identical (prompts) | prompts whose responses are all the same text
rows_used | rows used (responses) | responses passed through the model: those with an advantage other than
  zero, all with a kl_coef
response_length | train length (tokens) | mean tokens per response
response_length_right | train length, right (tokens) | the same of the responses whose reward is 1; absent
  where there is none
response_length_wrong | train length, wrong (tokens) | the same of the other responses
truncated_share | truncated (share) | share of responses cut at max_tokens
clip_fraction | clipped (share) | share of all response tokens (sequences for gspo) at which clipping
  binds, rows not used counting as not clipped; _low and _high by side
clip_fraction_low | clipped low (share) | negative advantage, ratio below 1 - cliprange
clip_fraction_high | clipped high (share) | positive advantage, ratio above 1 + cliprange
ratio_min | smallest ratio | smallest importance ratio in the rows used: to the old policy where old
  log-probs are scored (a weighted method, or tis_cap), else to the sampler
ratio_max | largest ratio | largest importance ratio
kl | KL to the base model (nats / token) | with a kl_coef: mean of the estimate k3 over the response tokens,
  while training
logprob_gap_mean | log-prob gap (nats / token) | mean absolute difference between the trainer's and the
  sampler's log-probability of a sampled token, in the rows used, before the first update, nats
logprob_gap_max | largest log-prob gap (nats) | largest such gap
tis_share | capped by TIS (share) | share of the response tokens in the rows used whose trainer/sampler ratio
  was cut at tis_cap
lr | learning rate | learning rate
optimizer_steps | optimizer steps | optimizer steps taken from this rollout batch
skipped_steps | skipped optimizer steps | of these, those that were left out because the gradient was not
  finite; absent where none was
collapsed | collapse alarm | 1 in the steps at which the collapse rule holds (jobs.collapse), else absent
time_sample | sampling (s) | seconds spent generating
time_train | training (s) | seconds spent scoring and updating
time_eval | evaluation (s) | seconds spent evaluating
time_sync | weight sync (s) | seconds spent handing weights to the sampler
time_cpu | CPU time (s) | seconds of CPU time the whole step took in this process, all threads together
tokens_per_second | tokens / s | response tokens generated per second of generation
val_reward | validation accuracy | validation accuracy (one sample each), at evaluation steps only
val_reward_se | standard error | its standard error over problems
val_format_reward | validation format (share) | share of well-formed validation responses
val_response_length | validation length (tokens) | mean tokens of a validation response
val_length_right | validation length, right (tokens) | the same of the responses whose reward is 1
val_length_wrong | validation length, wrong (tokens) | the same of the other responses
val_truncated_share | validation truncated (share) | share of validation responses cut at max_tokens
val_n | validation problems | validation problems used
"""
_ROWS = [line.split(" | ", 2) for line in _TABLE.replace("\n  ", " ").splitlines()]
METRICS = {name: meaning for name, _, meaning in _ROWS}
LABELS = {name: label for name, label, _ in _ROWS}
PHASES = ("time_sample", "time_train", "time_eval", "time_sync")
TIMES = (*PHASES, "time_cpu", "tokens_per_second")  # all that differs between two runs of one seed
