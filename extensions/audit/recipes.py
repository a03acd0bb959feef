"""How to record a batch of a trainer: what --recipes prints. The recording itself is extensions/record.py."""

RECIPES = """\
Recording a trainer (extensions/record.py; make the lab importable: PYTHONPATH=PATH/TO/LAB). Each recorded optimiser step
is a folder with one file a rank and micro-batch; audit one file, or the folder as one step:

    python -m extensions.audit recorded/step_000010/rank0_mb0.npz
    python -m extensions.audit recorded/step_000010/

TRL - GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer, and classes derived from them (run against TRL 1.16.0 by
verification/test_audit_recipes.py): wrap the class, and build and train it as before:

    from extensions.record import record

    trainer = record(GRPOTrainer, "recorded", every=10)(model, ...)

Any loop - before loss.backward(), with the tensors that the loss was computed from:

    from extensions.record import record_loss

    record_loss("recorded", loss, step=step, micro_batch=i, accumulation_steps=M, every=10,
                logps=logps, old_logps=old_logps, mask=mask, advantages=advantages, rewards=rewards, group_ids=group_ids,
                clip_low=0.2, clip_high=0.2)

verl - in the actor's update, around the policy loss function (names as verl 0.9.1 has them; any function whose arguments
have names of the table works):

    from extensions.record import record_loss_function

    policy_loss_fn = record_loss_function(get_policy_loss_fn(loss_mode), "recorded", every=10,
                                          accumulation_steps=self.gradient_accumulation)

Arrays that you have already, under any name that --help lists:

    from extensions.record import save

    save("batch.npz", logps=logps, mask=mask, advantages=advantages, loss=loss, dloss_dlogps=gradient)
"""
