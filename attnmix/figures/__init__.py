"""Figures for papers, in one style, and the labels and colours of figures and page."""

from attnmix.core.caches import use_writable_caches
from attnmix.core.extras import require_extra

require_extra("page", "drawing")
use_writable_caches()  # before matplotlib is imported
