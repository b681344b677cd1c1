"""LRU and ARC as the literature has them: one size, one request at a time, plain lists, LRU end first."""

from __future__ import annotations


class PageLRU:
    def __init__(self, c: int) -> None:
        self.c = c
        self.pages: list[int] = []

    def request(self, x: int) -> bool:
        hit = x in self.pages
        if hit:
            self.pages.remove(x)
        elif len(self.pages) == self.c:
            del self.pages[0]
        self.pages.append(x)
        return hit


class PageARC:
    """Figure 4, line by line."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> bool:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:
            self.p = min(self.p + max(1.0, len(b2) / len(b1)), self.c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            self.p = max(self.p - max(1.0, len(b1) / len(b2)), 0.0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            self.make_room_for_new(x)
            t1.append(x)
        return False

    def make_room_for_new(self, x: int) -> None:
        t1, t2, b1, b2 = self.t1, self.t2, self.b1, self.b2
        if len(t1) + len(b1) == self.c:
            if len(t1) < self.c:
                del b1[0]
                self.replace(x)
            else:
                del t1[0]
        elif len(t1) + len(t2) + len(b1) + len(b2) >= self.c:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * self.c:
                del b2[0]
            self.replace(x)

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))
