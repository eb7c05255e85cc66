"""What decides about seeds: packets in, commands out, each decision explained. `runtime.controller` is the
way in; nothing here moves a slot."""
