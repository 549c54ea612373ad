"""Steps that write a run: each reads what the steps before it left below a `Run`, and writes one folder of it."""
