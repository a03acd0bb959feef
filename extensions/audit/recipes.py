"""How to record a batch in TRL and verl: what --recipes prints."""

RECIPES = """\
Recording recipes (the TRL ones are run by verification/test_audit_recipes.py against TRL 1.16.0):

TRL GRPOTrainer - subclass, and write what `_compute_loss` read and returned:

    import numpy as np, torch

    class RecordingGRPOTrainer(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if outputs[0].requires_grad:
                self.recorded_logps = outputs[0]
            return outputs

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            logps = self.recorded_logps
            (gradient,) = torch.autograd.grad(loss, logps, retain_graph=True)
            arrays = {"logps": logps, "dloss_dlogps": gradient, "loss": loss, "mask": inputs["completion_mask"],
                      "completion_ids": inputs["completion_ids"], "advantages": inputs["advantages"],
                      "num_items_in_batch": torch.as_tensor(inputs["num_items_in_batch"]), "beta": torch.tensor(self.beta),
                      "budget": torch.tensor(self.max_completion_length), "clip_low": torch.tensor(self.epsilon_low),
                      "clip_high": torch.tensor(self.epsilon_high),
                      "accumulation_steps": torch.tensor(self.current_gradient_accumulation_steps)}
            for name, key in (("old_logps", "old_per_token_logps"), ("ref_logps", "ref_per_token_logps")):
                if inputs.get(key) is not None:
                    arrays[name] = inputs[key]
            np.savez("batch.npz", **{name: value.detach().float().cpu().numpy() for name, value in arrays.items()})
            return loss

`rewards` and `group_ids` let the audit check the advantages too. TRL computes them over the whole generation batch and then
shuffles: record them where that happens, in `_generate_and_score_completions` (before the shuffle), with `advantages`, as a
file of its own; groups are consecutive rows there: group_ids = np.arange(rows) // num_generations.

TRL DPOTrainer - the policy and then the reference run once in `_compute_loss`; keep what they return:

    class RecordingDPOTrainer(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs=False):
            seen = []
            modules = {id(module): module for module in (model, self.ref_model) if module is not None}.values()
            hooks = [module.register_forward_hook(lambda _, args, output: seen.append(output.get("log_probs")))
                     for module in modules]
            try:
                result = super()._compute_loss(model, inputs, return_outputs)
            finally:
                for hook in hooks:
                    hook.remove()
            loss = result[0] if return_outputs else result
            mask = inputs["completion_mask"][:, 1:].bool()               # the log-probability of token t + 1 stands at t
            logps, ref_logps = (x[:, -mask.shape[1]:] for x in seen[:2])
            (gradient,) = torch.autograd.grad(loss, seen[0], retain_graph=True)
            chosen, rejected = torch.where(mask, logps, 0.0).sum(1).chunk(2)
            ref_chosen, ref_rejected = torch.where(mask, ref_logps, 0.0).sum(1).chunk(2)
            arrays = {"logps": logps, "ref_logps": ref_logps, "dloss_dlogps": gradient[:, -mask.shape[1]:], "loss": loss,
                      "chosen_logps": chosen, "rejected_logps": rejected, "ref_chosen_logps": ref_chosen,
                      "ref_rejected_logps": ref_rejected, "beta": torch.tensor(self.beta), "mask": mask}
            np.savez("pairs.npz", **{name: value.detach().float().cpu().numpy() for name, value in arrays.items()})
            return result

verl - in the actor's update, beside the call of the policy loss function (names as verl 0.9.1 has them):

    pg_loss, metrics = policy_loss_fn(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages,
                                      response_mask=response_mask, loss_agg_mode=loss_agg_mode, config=config)
    (gradient,) = torch.autograd.grad(pg_loss, log_prob, retain_graph=True)
    np.savez("batch.npz", **{name: x.detach().float().cpu().numpy() for name, x in dict(
        log_prob=log_prob, old_log_probs=old_log_prob, response_mask=response_mask, advantages=advantages,
        dloss_dlogps=gradient, loss=pg_loss, token_level_rewards=data["token_level_rewards"]).items()},
        uid=np.array(data["uid"], dtype=str), clip_low=config.clip_ratio_low, clip_high=config.clip_ratio_high)
"""
