"""The feature store: one Zarr array for each layer and capture point, and the tokens table."""

from stages.store.activations import (
    TOKEN_COLUMNS,
    StorePlan,
    check_fits,
    create_stores,
    open_store,
    plan_store,
    read_blocks,
    read_features,
    read_rows,
    read_tokens,
    stored_sites,
    tokens_file,
    write_block,
)

__all__ = [
    "TOKEN_COLUMNS",
    "StorePlan",
    "check_fits",
    "create_stores",
    "open_store",
    "plan_store",
    "read_blocks",
    "read_features",
    "read_rows",
    "read_tokens",
    "stored_sites",
    "tokens_file",
    "write_block",
]
