"""The lab's atoms on a real transformer: SFT, PPO, DPO, online DPO, GRPO and RLOO with a verifier, on a CPU.

What moving from a table of logits to a language model adds, all of it running here: autoregressive generation, response
masks, left padding, a verifiable reward, a frozen reference, cached old log-probabilities, groups, held-out evaluation.

    task.py       prompts, right answers, held-out split, verifiers
    model.py      the transformer, key-value cache, sampling, the two masks
    stage.py      settings, well-known mistakes, what a training is given
    methods.py    the six trainings
    measure.py    what a policy does, measured the same way for all
    training.py   train(): from a start to its history
    files.py      what a training writes; command.py is the command line

No objective is written here: the losses are atoms of rl_lab.py, reductions of token_objectives.py and rows of
extensions/objectives.

Same as the papers: DPO on summed log-probabilities against a fixed reference; outcome GRPO with one advantage per answer;
RLOO with the KL in the reward; PPO for language models with a token-level critic, GAE over response tokens and the KL in the
reward. Simplified: float32, one batch per update (no minibatches), answers of at most 7 tokens, so that the token limit
belongs to the task and a truncated answer has ended (terminated, no bootstrap). Left out: entropy bonus, value clipping,
advantage standardisation in PPO.

Measured with the defaults on seeds 0, 7, 19. Sampled held-out accuracy 0.50-0.58 after SFT; 0.97-1.00 after every method,
greedy 0.99-1.00. What did not work, or does not show:
- Few preference pairs: with about 105 (--dpo-prompts 128) DPO ends at 0.17-0.23 while its pair accuracy reaches 1.0 and the
  chosen answers lose 2.2-3.6 nats; about 220 pairs give 0.29-0.48, 880 give 0.80-0.95, 3500 give 0.99-1.00.
- The critic explains nothing once answers are good: explained variance is about 0, then negative, as returns stop varying.
- Variants of the objective end within the spread of the seeds: answers are short and ratios stay near 1. What they change
  is shown exactly in extensions/objectives.
- The KL to the reference ends near the same number for every method: there is one right answer to each prompt, and a policy
  that always gives it is -log p_ref(answer) away.
- A weak verifier (sorted-only) is satisfied after 60 rounds of GRPO, reward 0.99-1.00, at accuracy 0.000-0.001 without KL
  and 0.00-0.02 with the default weight; at 0.05 the KL keeps 0.54-0.62 and the reward is 0.97-1.00 all the same. An exact
  verifier on 4, 16, 64 prompts: reward 0.98-1.00, accuracy 0.09-0.53, 0.57-0.67, 0.87-0.89.

Letters: N answers, R response positions, G answers to one prompt, V vocabulary. Tensors are aligned to the
response: column t belongs to the t-th token that the policy wrote.
"""

from extensions.tiny_lm.files import paths_of, run_document, save, without_infinity, without_nan
from extensions.tiny_lm.measure import measure, sample_records
from extensions.tiny_lm.methods import (
    COST_COLUMNS,
    EVALUATION_COLUMNS,
    GROUP_COLUMNS,
    METHODS,
    PAIR_COLUMNS,
    TRAINABLE_ROWS,
    AnswerPairs,
    Method,
    columns_of,
    dpo,
    dpo_update,
    explained_variance,
    group_policy_gradient,
    make_pairs,
    objective_row,
    online_dpo,
    own_steps,
    pair_logps,
    ppo,
    ratio_error,
    supervised,
    token_advantages,
)
from extensions.tiny_lm.stage import MISTAKES, SAMPLING, Answers, Diagnostics, Mistake, Scored, Stage, TinySettings
from extensions.tiny_lm.training import TrainingRun, check_names, train
