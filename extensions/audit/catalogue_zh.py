"""The catalogue in Chinese: for each name of catalogue.py a heading, what it does, and what to change.

This file and words_zh.py (titles, and the advice that stands outside the catalogue) hold all Chinese of the audit. English
stays the source: a finding's name, its numbers, its evidence and the JSON do not depend on the language; say/chinese.py puts
these words in place of the English ones when the report is printed.
Terms are those of reference/README.zh.txt's glossary. Code, names and numbers stand as in the English text.

To add a mistake: after catalogue.py, its three texts here (test_chinese.py names what is missing).
"""

from __future__ import annotations

from typing import NamedTuple


class Chinese(NamedTuple):
    heading: str
    what: str
    advice: str = ""


CATALOGUE_ZH: dict[str, Chinese] = {
    # ---- 掩码、移位、EOS、填充
    "mask_one_step_late": Chinese(
        "掩码晚了一个 token",
        "loss 使用的掩码比录下的掩码晚一个 token",
        "对数概率属于目标 token：掩码要和标签一样切，用 mask[:, 1:]，不是 mask[:, :-1]",
    ),
    "mask_one_step_early": Chinese(
        "掩码早了一个 token",
        "loss 使用的掩码比录下的掩码早一个 token",
        "掩码和标签一起切：移位后位置 t 的对数概率预测的是 t + 1 处的 token",
    ),
    "eos_dropped": Chinese(
        "漏掉真正的 EOS",
        "真正的序列结束 token 没有计入",
        "按位置或长度做掩码，不要按编号：pad id = EOS id 时，ids != pad 会丢掉真正的 EOS",
    ),
    "padding_counted": Chinese(
        "计入了填充", "回答结束之后的位置参与了计算", "先用回答掩码选出位置再求和；不要靠乘掩码来去掉它们"
    ),
    "prompt_counted": Chinese(
        "计入了 prompt",
        "prompt 的 token 参与了计算：把注意力掩码当成了损失掩码",
        "loss 里用回答掩码；注意力掩码只属于模型的前向计算",
    ),
    "tool_tokens_counted": Chinese(
        "计入了工具 token",
        "工具或环境写出的 token 参与了计算",
        "在 loss、KL、优势和分母里，都要去掉工具掩码标出的 token",
    ),
    "dropped_rows_in_denominator": Chinese(
        "分母里还有被丢弃的回答",
        "被丢弃（截断）的回答，其 token 在分子里没有，在分母里却计入了",
        "分子和分母用同一个掩码",
    ),
    "padding_in_denominator": Chinese(
        "分母里计入了填充",
        "求平均时除以补齐后批次的全部位置数，而不是计入的 token 数",
        "除以 mask.sum()：(x * mask).mean() 的值取决于批次补齐到多长",
    ),
    "nonfinite_in_masked_slots": Chinese(
        "未用的位置不是有限数",
        "没有用到的位置里是 NaN 或无穷大",
        "做任何运算之前先用 torch.where 选择：0 * NaN 是 NaN，在 loss 和它的梯度里都是",
    ),
    "positive_logps": Chinese(
        "对数概率大于 0",
        "有一个对数概率大于 0",
        "未用的位置填 0，并用掩码排除；填成正数，会进入每一个没有加掩码的求和",
    ),
    "tool_tokens_in_gae": Chinese(
        "GAE 把工具 token 当成时间步",
        "GAE 的递推把工具或环境写出的 token 当成了策略的时间步",
        "遇到这些 token 时，优势和下一步价值原样传过去；一个时间步就是策略写出的一个 token",
    ),
    "packed_border_counted": Chinese(
        "打包行跨过了回答边界",
        "打包的一行被当成一个序列整体移位：前一个回答的最后一个 token 去预测下一个回答的第一个 token",
        "把每一段的第一个 token 从掩码里去掉，或者在每一段内部各自移位",
    ),
    "mask_not_contiguous": Chinese(
        "掩码中间有空洞",
        "一条回答里计入的 token 不连续",
        "如果空洞处的 token 由工具或环境写出，就是对的；否则按回答长度做掩码",
    ),
    # ---- 归约与分母
    "extra_division": Chinese(
        "多除了一次",
        "loss 又多除了一个整数：梯度累积步数、进程数或 micro-batch 数",
        "已经在整个窗口上归一化的 loss，要在 micro-batch 和进程之间求和，不能再求平均",
    ),
    "generation_tokens_for_step": Chinese(
        "一步除以整个生成批次的 token 数",
        "一个优化器步的 loss 除以了整个生成批次的 token 数",
        "除以这一步累积的 token 数：第一次 backward 之前，先对它的各个微批次和各个 rank 求和",
    ),
    "sum_for_mean": Chinese(
        "该平均处用了求和",
        "该求平均的地方用了求和：没有除以行数或 token 数",
        "除以所声明的归约方式的分母；否则步长会随批次变大",
    ),
    "loss_sign": Chinese(
        "loss 符号反了",
        "整个 loss 的符号反了：目标被最小化了",
        "loss = -objective；做最小化的训练器要拿到负的代理目标",
    ),
    "reduction_differs": Chinese(
        "归约方式与声明不同",
        "loss 的归约方式与声明的不同",
        "改正归约方式，或声明实际使用的那一种：按回答平均和按 token 平均是不同的目标",
    ),
    # ---- 比率与裁剪
    "old_logps_recomputed": Chinese(
        "old_logps 被重算",
        "重要性采样比率恒为 1：旧对数概率是用正在更新的策略重算的",
        "采样时把 old_logps 存一次，之后每一遍都传入这一份",
    ),
    "old_logps_not_detached": Chinese(
        "old_logps 没有停止梯度",
        "比率不带梯度：旧对数概率就是带着计算图的当前对数概率",
        "第一遍用 old_logps = logps.detach()，之后用存下的数",
    ),
    "ratio_detached": Chinese(
        "比率被停止了梯度",
        "loss 的值是对的，策略项却没有梯度：比率被 detach 了",
        "去掉当前对数概率上的 detach()（或 no_grad）",
    ),
    "ratio_inverted": Chinese("比率写倒了", "比率写成了 old / current，应为 current / old", "写成 ratio = exp(logps - old_logps)"),
    "clip_sides_swapped": Chinese(
        "裁剪上下宽度对调",
        "裁剪的下宽度和上宽度对调了",
        "clip(ratio, 1 - low, 1 + high)：较大的宽度通常是上面那个",
    ),
    "clip_one_sided": Chinese(
        "只裁剪了一侧", "比率只有一侧被裁剪", "min(r A, clip(r, 1 - low, 1 + high) A) 需要上下两个界"
    ),
    "clip_lower_bound_wrong": Chinese(
        "裁剪下界写错", "裁剪的下界写成了 epsilon，应为 1 - epsilon", "写成 clamp(ratio, 1 - epsilon, 1 + epsilon)"
    ),
    "clip_without_min": Chinese(
        "裁剪后没有取最小值",
        "只用了裁剪后的乘积，没有在两者之间取最小值",
        "loss = -min(r A, clip(r) A)：没有最小值，被推错方向的 token 就得不到拉回来的梯度",
    ),
    "max_for_min": Chinese(
        "最小值写成最大值",
        "取了两个乘积中较大的一个",
        "目标取最小值；已经取负的 loss 取最大值：负号只取一次",
    ),
    "min_before_multiplying": Chinese(
        "先取最小值再乘优势",
        "在比率与裁剪后的比率之间取了最小值，之后才乘优势",
        "先乘：min(r A, clip(r) A)；A < 0 时两种次序的结果不同",
    ),
    "advantages_mixed_in_products": Chinese(
        "两个乘积用了不同的优势",
        "裁剪的两个乘积用了不同的优势：一个是原始的，一个是标准化后的",
        "优势只标准化一次，并且在第一个乘积之前完成",
    ),
    "clip_part_by_part": Chinese(
        "逐个分量裁剪",
        "裁剪作用在动作每个分量的比率上，而不是它们的乘积上",
        "先把各个分量的对数概率加起来；一个动作只有一个比率",
    ),
    "dual_clip_on_positive": Chinese(
        "正优势处用了 dual clip", "dual clip 的下限 c A 在 A > 0 处也起了作用", "max(., c A) 只用在 A < 0 处"
    ),
    "sequence_sum_for_mean": Chinese(
        "序列比率用和代替平均",
        "一条回答的比率是对数比之和的指数，而不是平均的指数",
        "GSPO 的比率是 exp(mean_t(l - l0))；连乘积属于 RLOO，回答一长就会离开裁剪区间",
    ),
    "cap_after_exp": Chinese(
        "取指数之后才截断",
        "本该限制对数比的上限，用在了取指数之后",
        "先截断对数比，再取 exp：很大的对数比在后面的截断起作用之前就溢出了",
    ),
    "missing_stop_gradient": Chinese(
        "该停止梯度处没有停止", "本应是常数的权重带着梯度", "乘在 A l 上的裁剪后比率要停止梯度（detach）"
    ),
    "ratio_differs": Chinese("比率与声明不同", "使用的比率与声明的不同", "改正比率的级别，或声明实际使用的那一种"),
    "surrogate_differs": Chinese(
        "代理目标与声明不同", "使用的代理目标与声明的不同", "改正 loss 类型，或声明实际使用的那一种"
    ),
    "clip_range_differs": Chinese(
        "裁剪宽度与声明不同",
        "裁剪的宽度与声明的不同",
        "查清训练器读的是哪个选项：有的训练器给同一个宽度起了两个名字",
    ),
    "first_pass_ratio_not_one": Chinese(
        "第一遍比率不是 1",
        "对一个批次的第一遍，比率不是 1",
        "采样器与训练器不一致：训练器里也要用采样温度，比较完整的（不是 top-k 或 top-p 重新归一化的）对数概率，"
        "两边都用 float32",
    ),
    "old_logps_equal_logps": Chinese(
        "后面的遍里新旧对数概率相等",
        "在后面的一遍里，存下的旧对数概率与当前的完全相等",
        "检查 old_logps 是在采样时存下的，而不是重算的",
    ),
    "stored_in_bf16": Chinese(
        "对数概率存成了 bfloat16",
        "存下的每个对数概率都落在 bfloat16 的格点上",
        "对数概率用 float32 保存：在 -12 处 bfloat16 的一格是 0.0625，比率的误差是 6 %",
    ),
    "clip_widths_unusual": Chinese(
        "裁剪宽度不寻常",
        "声明的裁剪宽度不寻常",
        "检查两个宽度的次序：low 在前，high 在后；dual clip 的 c 要大于 1",
    ),
    # ---- KL
    "kl_sign": Chinese(
        "KL 符号反了", "loss 里减去了 KL 项：离参考策略越远，奖励越高", "写成 loss = policy_loss + coef * kl"
    ),
    "kl_direction": Chinese(
        "KL 方向反了",
        "KL 估计量里两个策略对调了",
        "在当前策略的样本上，k3 = exp(ref_logps - logps) - (ref_logps - logps) - 1",
    ),
    "kl_ratio_for_log_ratio": Chinese(
        "KL 里用了比率", "KL 估计量里该用对数比的地方用了比率", "k3 取 d = logps - ref_logps：exp(-d) + d - 1"
    ),
    "kl_without_gradient": Chinese(
        "KL 项没有梯度",
        "KL 项进入了 loss 的值，却没有梯度",
        "KL 项里的 logps 要保留计算图；只有 ref_logps 停止梯度",
    ),
    "kl_estimator_gradient": Chinese(
        "k1 放进了 loss",
        "loss 里放的是 k1（logps - ref_logps）：它的期望梯度为零，什么也约束不了",
        "用 k2、用以比率加权的 k3，或把 k1 放进奖励",
    ),
    "kl_differs": Chinese("KL 项与声明不同", "KL 项与声明的不同", "改正估计量和它的位置，或声明实际使用的"),
    "beta_twice": Chinese("beta 乘了两次", "系数用了两次", "beta 只乘一次：在 loss 里，或在记录的奖励里"),
    "kl_coef_differs": Chinese(
        "KL 系数不同", "能重现 loss 的 KL 系数不是录下的那个", "查清训练器读的是哪个选项"
    ),
    # ---- 组内优势
    "groups_pooled": Chinese(
        "跨组求基线",
        "基线取自整个批次，而不是同一个 prompt 的各个回答",
        "按 prompt id 分组：混在一起求平均，会让简单 prompt 的回答全都显得好",
    ),
    "groups_assumed_contiguous": Chinese(
        "误认为同组相邻",
        "奖励按位置切成组，同一个 prompt 的回答却不挨在一起",
        "按 id 分组，或先把批次排好序再 reshape(-1, G)",
    ),
    "sample_for_population_std": Chinese(
        "用了样本标准差",
        "标准差除以 G - 1，声明的却是 G",
        "torch.std 默认 correction=1；传 correction=0，或声明 ddof 1",
    ),
    "population_for_sample_std": Chinese(
        "用了总体标准差", "标准差除以 G，声明的却是 G - 1", "传 correction=1（numpy：ddof=1），或声明 ddof 0"
    ),
    "std_eps_differs": Chinese("标准差的 eps 不同", "加在标准差上的保护项与声明的不同", "改正 std_eps，或声明它"),
    "advantage_rule_differs": Chinese("优势规则与声明不同", "优势按另一种规则计算，与声明的不同", "改正估计方法，或声明它"),
    "roundoff_std": Chinese(
        "除以舍入误差",
        "一组奖励全同，优势却不是 0：舍入误差除以了它自己的大小",
        "奖励全同的组按零差异组处理，优势恰好给 0",
    ),
    "missing_reward_counted": Chinese(
        "缺失的奖励被计入",
        "缺失的奖励（NaN）按 0 计入了组的均值",
        "求均值和标准差时排除这一行，并给它优势 0",
    ),
    "dropped_rows_in_baseline": Chinese(
        "基线里有空回答",
        "没有计入任何 token 的回答（空的，或因截断而丢弃）参与了组的均值和标准差",
        "这要有意决定：排除它们，会改变该组的每个优势",
    ),
    "padding_in_whitening": Chinese(
        "白化时计入填充",
        "白化后的优势，均值取在填充上，方差取在计入的 token 上",
        "两者用同一个掩码：白化后的优势在计入的 token 上均值为 0、方差为 1",
    ),
    "advantages_aligned_with_time": Chinese(
        "优势对到了时间轴",
        "第 i 条回答的优势被用在每条回答的位置 i：漏了 unsqueeze(1)",
        "advantages.unsqueeze(1)：形状 (N, 1) 对 (N, T)；N = T 时这个错误不会报错",
    ),
    "advantage_sign": Chinese("优势符号反了", "优势的符号与规则相反", "写成 A = R - baseline"),
    "advantages_of_other_rows": Chinese(
        "用了别的行的优势",
        "训练时某些行用的是另一行的优势",
        "对数概率和优势保持同一个次序：切分、排序、打乱都一起做",
    ),
    "advantages_not_used": Chinese(
        "没有使用优势", "loss 用了录下的另一组数，而不是优势", "loss 的每个乘积都要传入优势"
    ),
    "std_of_others_is_zero": Chinese(
        "其余回答的标准差为 0",
        "优势除以了同组其余回答的标准差，而它是 0，只剩一个很小的保护项",
        "其余回答没有差别时，A = R - 其余回答的均值 不再缩放；或者用整组的标准差",
    ),
    "group_of_one": Chinese(
        "组里只有一个回答",
        "某个 prompt 只有一个回答：没有可以比较的对象",
        "每个 prompt 至少采两个回答，或说明只有一个时怎么办",
    ),
    # ---- 时间
    "one_flag_for_two": Chinese(
        "一个标志当两个用",
        "时间上限被当成了真正终止：没有用最后观测的价值自举",
        "terminated（不自举）与 truncated（自举，但断开递推）分开保存",
    ),
    "shifted_flags": Chinese(
        "终止标志错开一步",
        "回合结束标志读错了一步",
        "标志 t 属于从 t 开始的那一步转移；存回合开始标志的缓冲区要用 t + 1",
    ),
    "reset_value_used": Chinese(
        "自举用了重置后的价值",
        "时间上限处自举时，读的是下一个回合第一个观测的价值",
        "保留真正的最后观测，用 critic 对它求值",
    ),
    "leak_across_episodes": Chinese(
        "优势跨回合泄漏",
        "优势的递推越过了回合的结尾",
        "在每个边界处把传下来的优势乘以 0，截断的边界也一样",
    ),
    "last_bootstrap_trimmed": Chinese(
        "最后的自举值被截掉",
        "最后一步用自己的价值自举，而不是它之后的价值",
        "保留 T + 1 个价值：最后一步之后的那个就是最后的自举值",
    ),
    "rewards_one_slot_late": Chinese(
        "奖励晚了一格", "位置 t 里是第 t 步之前得到的奖励", "存从 t 开始的那一步转移的奖励"
    ),
    "reward_minus_value": Chinese(
        "用奖励减价值",
        "优势是奖励减价值，而不是回报减价值",
        "用回报减价值（或用 GAE）：否则只有得到奖励的 token 才分到功劳",
    ),
    "returns_standardised": Chinese(
        "价值目标被标准化",
        "评论家的目标被标准化了，而优势是对的",
        "只有评论家的输出也按同样的数标准化时才对；否则 目标 = advantages + values",
    ),
    "returns_do_not_fit": Chinese(
        "回报与优势对不上",
        "优势是对的，但旁边的回报不等于 advantages + values",
        "评论家的目标是标准化优势之前的 A + V",
    ),
    "advantages_do_not_fit": Chinese(
        "优势与回报对不上",
        "回报是对的，但旁边的优势不等于 returns - values",
        "A = returns - values，之后标准化或者完全不标准化",
    ),
    "bootstrap_beyond_time_limit": Chinese(
        "没有被截断的环境也得到自举值",
        "没有被截断的环境，奖励里也加进了最终观测的价值",
        "只在 truncated 且不是 terminated 的地方加 gamma V(最终观测)，逐个环境处理",
    ),
    "score_on_wrong_token": Chinese(
        "得分放错了 token",
        "回答的得分不在它最后一个计入的 token 上",
        "放在每行最后一个计入的 token 上，用掩码去找：短的行里最后一列是填充",
    ),
    "flags_missing": Chinese(
        "缺少一个标志",
        "一个回合结束标志回答不了两个问题",
        "请记录 terminated 和 truncated，以及真正最后观测的价值",
    ),
    "reset_rows_counted": Chinese(
        "计入了重置行",
        "动作被环境忽略的行（next-step autoreset，下一步才自动重置）参与了计算",
        "每个结尾之后的那一行要用掩码去掉",
    ),
    # ---- 偏好对
    "chosen_rejected_exchanged": Chinese(
        "chosen 与 rejected 对调",
        "被选中的回答与被拒绝的回答对调了",
        "检查数据集的列次序，以及拼接后批次的次序",
    ),
    "reference_missing": Chinese(
        "缺少参考策略",
        "间隔里没有参考策略的对数概率",
        "减去它们，或声明一种不用参考策略的 loss（SimPO、ORPO）",
    ),
    "reference_live": Chinese(
        "参考策略没有冻结",
        "参考策略就是正在训练的策略：每一步间隔都是 0",
        "训练前冻结一份副本（用 adapter 时：算参考策略的那次前向要关掉 adapter）",
    ),
    "ipo_sum_or_mean": Chinese(
        "IPO 的和与平均混用",
        "IPO 声明用平均却用了求和，或者相反",
        "目标 1 / (2 beta) 对求和与对平均的含义不同",
    ),
    "dpo_mean_for_sum": Chinese(
        "DPO 的平均与和混用",
        "声明求和的地方用了按 token 的平均，或者相反",
        "DPO 的 log pi(y | x) 是整条回答的和",
    ),
    "length_of_other_tokens": Chinese(
        "求和与长度计的不是同一批 token",
        "回答的对数概率之和与它所除的长度，计入的 token 不同",
        "两者取自同一个掩码：(logps * mask).sum() / mask.sum()",
    ),
    "odds_constant": Chinese(
        "几率里的常数不是 1",
        "几率写成 p / (c - p)，而 c 不是 1：策略很有把握时会有偏差",
        "odds = s - log(-expm1(s)) 一直到 s = 0 都是准确的，不需要常数",
    ),
    "smoothing_variant": Chinese(
        "标签平滑的变体不同", "标签平滑按另一种变体计算，与声明的不同", "cDPO 把翻转后的 loss 混进来，robust DPO 把它减去"
    ),
    "smoothing_reversed": Chinese(
        "标签平滑的权重对调",
        "标签平滑的两个权重对调了：翻转的标签得到了 1 - e",
        "写成 loss = -(1 - e) log s(z) - e log s(-z)",
    ),
    "preference_loss_differs": Chinese(
        "偏好 loss 与声明不同",
        "loss 的类型与声明的不同：选项没有传下去",
        "检查 loss_type 是否真的传到了 loss 函数",
    ),
    "kl_pair_is_own_answer": Chinese(
        "KL 配对用了自己的回答",
        "KTO 估计 KL 的配对里，放的是该行自己的回答，而不是另一个提示的回答",
        "在批次内把回答移动一行；把奇数大小的批次倒过来，中间一行仍配到自己的回答",
    ),
    "low_accuracy": Chinese(
        "偏好准确率低", "间隔为正的偏好对不到一半", "训练初期或偏好对很难时属正常；否则检查列的次序"
    ),
    # ---- 指标、价值、熵、日志
    "entropy_sign": Chinese("熵的符号反了", "熵奖励加进了 loss：熵被压低", "写成 loss = ... - coef * entropy"),
    "value_min_for_max": Chinese("价值损失取了最小值", "取了两个平方误差中较小的一个", "裁剪的价值损失取较大的一个"),
    "clip_fraction_differs": Chinese(
        "裁剪比例的定义不同",
        "上报的裁剪比例用的是另一种定义",
        "说明记录的是哪一种：比率越界、取到裁剪分支，还是没有梯度",
    ),
    "flat_log_mean": Chinese(
        "日志的平均没有分窗口",
        "日志里的平均值按 micro-batch 的个数给每个优化器步加权",
        "先在每个窗口内平均，再对窗口平均",
    ),
    "log_steps_not_increasing": Chinese(
        "日志步数不递增", "日志的步数列有重复、跳跃或倒退", "用优化器的步数作横轴，每步记一次"
    ),
    "gradient_value_disagree": Chinese(
        "梯度与值不一致",
        "梯度对得上，值对不上：上报的数里加进或乘进了别的东西",
        "请记录 backward() 所作用的那个值，或缺少的那一项的系数",
    ),
    "value_decides_nothing": Chinese(
        "单凭值无法判断",
        "没有一个常见的假设给出上报的值，而给出它的不常见假设太多，都算不上证据",
        "请记录 dloss_dlogps，以及各项设置（beta、clip_low、clip_high、accumulation_steps）",
    ),
    "gradient_differs_in_rows": Chinese(
        "部分行的梯度不同",
        "有一个目标与其余各行都吻合，某些行的梯度却不是它的",
        "看这几行：训练器对它们做了什么，没有录下来",
    ),
    "unexplained_factor": Chinese(
        "有解释不了的倍数",
        "梯度等于一个已知目标的梯度乘一个倍数，录下的任何计数都解释不了这个倍数",
        "请记录 num_items_in_batch、budget（max_completion_length）、accumulation_steps、world_size，或 loss 的缩放系数",
    ),
    "nothing_checked": Chinese(
        "什么也没检查",
        "这份录制里没有能重算的东西，所以什么也没检查",
        "请记录检查所需的数组：logps、mask、advantages，以及带 dloss_dlogps 的 loss；--recipes 会打印怎么录",
    ),
    "final_value_missing": Chinese(
        "缺少最后观测的价值",
        "有回合在缓冲区中间被切断，没有录下 critic 对真正最后观测的价值",
        "请记录 terminal_values（或重置之前的 next_values）",
    ),
    "not_reproduced": Chinese(
        "无法重现",
        "没有一个假设能重现上报的数",
        "请记录列为缺失的各项；表外的目标说不出名字（见 objectives 的 NOT_EXPRESSED）",
    ),
    "declared_not_seen": Chinese("声明的目标对不上", "按声明的目标重现不了上报的数", "与最佳匹配列出的各项选择逐一比较"),
}

STEP_MISTAKES_ZH: dict[str, Chinese] = {
    "mean_of_means": Chinese(
        "均值的均值",
        "每个微批次除以自己的计数，再对这些均值取平均：短的微批次权重过大",
        "先把整个一步在各 rank 和各微批次上的计数求和（all_reduce），再除以它",
    ),
    "local_count": Chinese(
        "各 rank 除以自己的计数",
        "每个 rank 除以自己的计数，而不是整个一步的计数",
        "在第一次 backward 之前 all_reduce 计数，并除以它（梯度取平均时再乘 world_size）",
    ),
    "forgot_world_size": Chinese(
        "忘了乘 world_size",
        "已除以整个一步的计数，而各 rank 取平均时又除以了 rank 数",
        "梯度取平均时把 loss 乘以 world_size，或者改为求和",
    ),
    "double_division": Chinese(
        "重复除以微批次数",
        "已除以整个一步的计数，又除以了微批次数",
        "两者去掉一个：许多框架自己会除以 gradient_accumulation_steps",
    ),
    "no_micro_division": Chinese(
        "微批次的均值直接相加",
        "各微批次的均值被相加，没有取平均",
        "除以整个一步的计数；用每个微批次的均值时还需要乘 1 / accumulation_steps",
    ),
    "local_padded_width": Chinese(
        "用了微批次自己的填充宽度",
        "本该用一个常数的地方，用了微批次自己的填充宽度",
        "除以一个常数（生成预算），不要除以微批次恰好填充到的宽度",
    ),
    "local_group_statistics": Chinese(
        "只用了组的一部分",
        "优势只用了组落在这个 rank 或这个微批次里的部分，而不是整组",
        "在各 rank 间收集（提示编号，奖励），对每个完整的组取均值和标准差",
    ),
    "local_whitening": Chinese(
        "只在本地标准化",
        "优势按这个 rank 或微批次的行标准化，而不是按整个一步的行",
        "在各 rank 间合并计数、均值和离差平方和，再标准化",
    ),
    "clip_before_reduce": Chinese(
        "归约之前就裁剪梯度",
        "每个 rank 先裁剪自己的梯度，再对裁剪后的取平均",
        "先归约，再裁剪优化器要用的那一个梯度",
    ),
}

MISTAKES_ZH = {**CATALOGUE_ZH, **STEP_MISTAKES_ZH}

NOTES_ZH: dict[str, Chinese] = {
    "loss_zero_healthy": Chinese(
        "loss 为 0 属正常", "loss 为 0 而有梯度：中心化的优势与等于 1 的比率在值里相互抵消，在梯度里不抵消"
    ),
    "no_signal": Chinese("没有信号", "没有梯度，因为每一组的奖励都没有差异：没有可学的东西，也没有坏掉的东西"),
    "equal_groups": Chinese("零差异组", "奖励全同的组优势为 0：训练后期属正常，prompt 很难时初期也会这样"),
    "negative_k1": Chinese("k1 为负", "k1 的平均小于 0 是小样本的噪声：同一批 token 上 k3 是正的"),
    "prompt_cancels": Chinese(
        "prompt 相互抵消", "两个回答共用 prompt 时，prompt 的对数概率在 DPO 的间隔里抵消，所以计入求和也不改变任何东西"
    ),
    "k3_gradient": Chinese(
        "k3 的梯度",
        "与论文一致，不用改：loss 里不带比率的 k3，平均起来的梯度是 KL(ref || policy) 的；它的值估计的是 "
        "KL(policy || ref)",
    ),
    "divided_by_whole_number": Chinese("除以一个整数", "loss 等于该目标除以一个整数：如果那是梯度累积步数，就是对的"),
    "unnamed_combination": Chinese("没有名字的组合", "每一项选择都是已知的，但表里没有一个有名字的目标这样组合"),
    "sampler_correction_absent": Chinese(
        "没有采样校正",
        "录下了采样器的对数概率，而 loss 没有用它校正：有意如此就没有问题，否则是训练器的某条代码路径漏掉了校正",
    ),
    "log_density_above_0": Chinese("对数密度大于 0", "大于 0 的对数概率是实值动作的密度：没有问题"),
}
