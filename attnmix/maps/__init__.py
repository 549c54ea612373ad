"""Maps: neighbours, layouts, and what a map is worth."""

from attnmix.core.caches import use_writable_caches

use_writable_caches()  # before numba is imported
