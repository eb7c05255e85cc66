"""Seeds: places in a model that can hold one artifact each, and what carries them through their life.

    model = runtime.wrap(model, sites="blocks.*.mlp", library=lib, seeds_per_layer=1)   # in place
    growth = runtime.growth_of(model)                       # sites, slots, queue, journal, limits
    runtime.attach(model, optimizer, scheduler=scheduler, scaler=scaler)
    ...
    # at the end of an epoch, what a controller does:
    snapshot = growth.snapshot()                            # device -> mirror once; SlotFacts of every slot
    growth.measure(slot_id, risk=0.1, confident=True)       # numbers that gates ask for and others know
    arms = growth.arms(slot_id, validate)                   # paired losses: with, without, snapshot
    growth.submit(KasminaControlCommand(...))               # queued, once per command_id
    boundary = growth.commit()                              # all queued commands, then the mechanical ones
    runtime.save_model(model, "out/")                       # weights.pt + lineage.json, loads without slots

`growth.sites` maps module name to `Site` (`.spec`: shape, dtype, device of the layer's result once seen;
`.state`: its `StateTensor`; `.slots`; `.features`); `growth.slots` is the tuple of all `Slot`s in the order
of commands (`slot.id` is "module.name/chunk"), `growth.slot(id)` finds one. A slot's state is read from the
mirror: `slot.state`, `slot.alpha`, `slot.facts()`. `growth.epoch` and `growth.step` are integers.
`growth.listeners` get an `Event` for everything that happens. `growth.observe(observer, every=50)` installs
telemetry. `growth.state_dict()` and `load_state_dict` are what checkpoints hold. Numbers of G0 that the
library knows (validated, risk, confidence, latency, parameters, memory) are measured by the mechanics when
the command names its artifact; those given by `measure` take precedence.
"""
