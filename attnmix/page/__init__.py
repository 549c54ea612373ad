"""The interactive page: one offline file with linked views of maps, ratios, text and steps."""

from attnmix.core.extras import require_extra

require_extra("page", "the interactive page")
