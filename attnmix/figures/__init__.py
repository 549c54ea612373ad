"""Figures for papers in a common style, and labels and colours for figures and the page."""

from attnmix.core.caches import use_writable_caches
from attnmix.core.extras import require_extra

require_extra("page", "drawing")
use_writable_caches()  # before matplotlib is imported
