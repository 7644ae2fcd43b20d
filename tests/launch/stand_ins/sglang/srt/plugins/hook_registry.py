import os


class _Everything:
    def __contains__(self, target: str) -> bool:
        return target != os.environ.get("STAND_IN_UNAPPLIED")


class HookRegistry:
    _patched = _Everything()
