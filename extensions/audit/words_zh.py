"""The audit's words in Chinese outside the catalogue: titles, fixed words, and advice that the code gives.

Each table is English -> Chinese; what it lacks is printed in English. test_chinese.py compares them with the code.
"""

from __future__ import annotations

OTHER_ADVICE_ZH: dict[str, str] = {
    "record beta": "请记录 beta",
    "record dloss_dentropies, which decides it": "请记录 dloss_dentropies，由它来判断",
    "record accumulation_steps": "请记录 accumulation_steps",
    "record accumulation_steps (and world_size): right if it is by these steps, and only once": "请记录 "
    "accumulation_steps（以及 world_size）：如果除的正是这些步数，而且只除一次，就是对的",
    "record num_items_in_batch, budget (max_completion_length), accumulation_steps": "请记录 "
    "num_items_in_batch、budget（max_completion_length）、accumulation_steps",
    "watch the share of groups with spread": "关注组内有差异的组所占的比例",
    "record a later step to be sure that the reference is frozen": "请再录后面的一步，以确认参考策略已冻结",
    "record gamma, lam, terminal_values and both flags": "请记录 gamma、lam、terminal_values 和两个标志",
    "record rewards before any shaping, group_ids, and for a micro-batch gen_rewards, gen_group_ids and row_ids of "
    "the whole generation batch": "请记录任何奖励塑形之前的 rewards、group_ids；micro-batch 还要记录整个生成批次的 "
    "gen_rewards、gen_group_ids 和 row_ids",
}
"""Advice that the code gives in place of the catalogue's (advice=... in say/ and checks/)."""

RECORD_ITEMS_ZH: dict[str, str] = {
    "both flags": "两个标志",
    "which decides it": "由它来判断",
    "the settings (beta, clip_low, clip_high, accumulation_steps)": "各项设置（beta、clip_low、clip_high、accumulation_steps）",
    "the value that backward() is called on": "backward() 所作用的那个值",
    "or the coefficient of the missing term": "或缺少的那一项的系数",
    "budget (max_completion_length)": "budget（max_completion_length）",
    "or the loss scale": "或 loss 的缩放系数",
    "terminal_values (or next_values before any reset)": "terminal_values（或重置之前的 next_values）",
    "the value of the true final observation": "真正最后观测的价值",
    "accumulation_steps (and world_size)": "accumulation_steps（以及 world_size）",
    "rewards before any shaping": "任何奖励塑形之前的 rewards",
    "for a micro-batch gen_rewards": "micro-batch 的 gen_rewards",
    "row_ids of the whole generation batch": "整个生成批次的 row_ids",
    "what a check needs": "检查所需的数组",
    "what is listed as missing": "列为缺失的各项",
    "an objective outside the table cannot be named (see NOT_EXPRESSED in objectives)": "表外的目标说不出名字（见 "
    "objectives 的 NOT_EXPRESSED）",
    "a later step to be sure that the reference is frozen": "后面的一步，以确认参考策略已冻结",
}
"""The parts of a list after "record": what is recorded already is taken out of it, so that it may have any of them left."""

WORDS_ZH: dict[str, str] = {
    "Audit of": "审计对象",
    "Batch": "批次",
    "Advantages": "优势",
    "Loss": "损失",
    "Gradient": "梯度",
    "What the gradient says": "梯度说明了什么",
    "Reported metrics": "上报的指标",
    "Findings": "发现",
    "To decide more, record": "要判断更多，请记录",
    "Remarks": "备注",
    "none": "无",
    "not checked": "没有检查",
    "mistake": "错误",
    "warning": "警告",
    "note": "说明",
    "rows": "行",
    "change": "改法",
    "Not mistakes": "不是错误",
    "agrees with the best match": "与最佳匹配一致",
    "agrees with the best match, whose value is not the reported one": "与最佳匹配一致，但最佳匹配的值不是上报的值",
    "differs from every right computation tried; agrees with one that has the mistake below": "与试过的每种正确算法都"
    "不同；与带有下面这个错误的算法一致",
    "recorded, and not checked: nothing to compare it with": "已录下，没有检查：没有可以比较的对象",
    "not recorded": "没有录下",
}
"""Titles and fixed words of the printed report."""

RECORD_NEXT_ZH: dict[str, str] = {
    "advantages or returns, as the loss used them": "loss 所用的 advantages 或 returns",
    "terminated and truncated as two flags (one flag was recorded)": "terminated 和 truncated 两个标志（只录了一个标志）",
    "last_values: the value after the last step": "last_values：最后一步之后的价值",
    "terminal_values: the value of the true final observation at each time limit (before the reset)": "terminal_values：每个"
    "时间上限处真正最后观测（重置之前）的价值",
    "ref_chosen_logps and ref_rejected_logps (or ref_logps)": "ref_chosen_logps 和 ref_rejected_logps（或 ref_logps）",
    "loss, and dloss_dchosen_logps, dloss_drejected_logps with it": "loss，连同 dloss_dchosen_logps、dloss_drejected_logps",
    "beta": "beta",
    "loss, and dloss_dlogps with it: torch.autograd.grad(loss, logps)": "loss，连同 dloss_dlogps：torch.autograd.grad(loss, "
    "logps)",
    "logps (rows x tokens)": "logps（行 x token）",
    "advantages, as the loss used them": "loss 所用的 advantages",
    "rewards (and group_ids), from which the advantages were made": "rewards（以及 group_ids），优势由它们算出",
    "group_ids, one number a row, equal for answers to the same prompt": "group_ids：每行一个数，同一个 prompt 的回答相同",
    "returns, values, vpreds, loss and dloss_dvpreds": "returns、values、vpreds、loss 和 dloss_dvpreds",
    "dloss_dlogps (or dloss_dchosen_logps and dloss_drejected_logps)": "dloss_dlogps（或 dloss_dchosen_logps 和 "
    "dloss_drejected_logps）",
    "dloss_dlogps: torch.autograd.grad(loss, logps, retain_graph=True)": "dloss_dlogps：torch.autograd.grad(loss, logps, "
    "retain_graph=True)",
    "logps, old_logps, mask (rows x tokens), advantages, loss and dloss_dlogps": "logps、old_logps、mask（行 x token）、"
    "advantages、loss 和 dloss_dlogps",
}
"""What the report asks to be recorded under "To decide more, record"; a bare name of an array needs no entry."""
