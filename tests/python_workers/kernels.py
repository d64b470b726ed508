"""Two subjects: one that is right, and one whose window is one key short."""

import mock


class Right(mock.Attention):
    is_subject = True


class Short(mock.Attention):
    is_subject = True

    def sees(self, i, j, lq, lk):
        left = self.problem["mask"].get("left")
        return super().sees(i, j, lq, lk) and (left is None or super().sees(i, j - 1, lq, lk))
