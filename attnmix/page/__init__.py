"""The interactive page: one file that opens from disk and shows maps, ratios, text and steps, linked."""

from attnmix.core.extras import require_extra

require_extra("page", "the interactive page")
