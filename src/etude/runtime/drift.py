"""An alarm on a series that grows: its level says little, for each precision has its own."""

from collections import deque

import numpy as np

_WINDOW = 24
_NEEDED = 8
_SIGNIFICANT = 4.0
"""Standard errors that the slope must lie above zero."""
_GROWTH = 0.5
"""Share of its first level by which the line must have grown within the window."""


class Drift:
    """Fits a line to the last values of a series."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.slope = 0.0
        """Change per version."""

    def add(self, version: int, value: float) -> bool:
        """Add a value; return whether the series grows by more than its noise explains."""
        if not self._points or version > self._points[-1][0]:
            self._points.append((float(version), value))
        if len(self._points) < _NEEDED:
            return False
        x, y = np.array(self._points).T
        centred = x - x.mean()
        spread = float((centred**2).sum())
        self.slope = float((centred * y).sum()) / spread
        line = y.mean() + self.slope * centred
        noise = float(((y - line) ** 2).sum() / (len(y) - 2) / spread) ** 0.5
        grown = float(line[-1] - line[0])
        return bool(self.slope > _SIGNIFICANT * noise and grown > _GROWTH * max(float(line[0]), 0.0) and grown > 0.0)
