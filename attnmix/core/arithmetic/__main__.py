"""Print environment variables for other programs: `env $(python -m attnmix.core.arithmetic) dask worker ADDRESS`."""

from attnmix.core.arithmetic.environment import SETTINGS

if __name__ == "__main__":
    print("\n".join(f"{name}={value}" for name, value in SETTINGS.items()))
