"""The interactive page: one HTML file that works offline, with linked views of maps, mixing ratios and texts."""

from attnmix.core.extras import require_extra

require_extra("page", "the interactive page")
