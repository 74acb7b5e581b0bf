"""Search for the configurations in linattn/ops/triton/table.json: see __main__.py."""
