"""Exact bias and variance of the estimators that PPO, GRPO, RLOO, KL penalties, off-policy corrections and DPO use.

line.py            one line of a table: mean, cosine, scale, tr Cov, MSE
policy.py          small policies, scores, J, its gradient, finite differences
enumerate.py       all groups that can be drawn, with their chances
sampled.py         rows of the objectives table on those groups
through.py         single steps of a row on single answers
sequences.py       a world of 15 whole answers
advantages.py, binary.py, kl.py, off_policy.py, lengths.py, sampler.py, preference.py, gae.py, passes.py: one table each
shared_features.py a DPO step in which both answers lose
tables.py          the registry of tables
of.py              a reader's own function
power.py           prompts, answers and seeds that show an effect
figure.py          the figure
command.py         python -m extensions.estimators
"""
