"""What tests share: oracles, models, programs and places."""
