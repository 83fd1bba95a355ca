DTYPES: dict[str, int]
REDUCTIONS: dict[str, int]
OPERATIONS: dict[str, int]

def new_address() -> str: ...
def set_label(label: str) -> str: ...
def set_library_folders(folders: list[str]) -> None: ...
def usable_cores() -> int: ...
def instruction_set() -> str: ...
def arena_used_bytes() -> int: ...

class ArenaBuffer:
    def __init__(self, bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Work:
    def wait(self, timeout_s: float = 0.0) -> None: ...
    def is_completed(self) -> bool: ...
    def error(self) -> BaseException | None: ...
    def duration_s(self) -> float: ...
    @property
    def source_rank(self) -> int: ...
    @property
    def description(self) -> str: ...

class Communicator:
    @staticmethod
    def connect(
        rank: int,
        world_size: int,
        address: str,
        name: str,
        timeout_s: float,
        grace_s: float,
        waiting_s: float,
        chunk_bytes: int,
        strict_sites: bool,
    ) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def submit(
        self,
        operation: int,
        send: int,
        recv: int,
        elems: int,
        dtype: int,
        reduction: int,
        root: int,
        timeout_s: float,
        asynchronous: bool,
        factor: float = 1.0,
        label: str = "",
        updates: int = 0,
    ) -> Work: ...
    def exchange(
        self,
        operation: int,
        sends: list[tuple[int, int]],
        recvs: list[tuple[int, int]],
        dtype: int,
        root: int,
        timeout_s: float,
        asynchronous: bool,
        label: str = "",
        updates: int = 0,
    ) -> Work: ...
    def message(
        self,
        operation: int,
        address: int,
        elems: int,
        dtype: int,
        peer: int,
        tag: int,
        timeout_s: float,
        asynchronous: bool,
    ) -> Work: ...
    def abort(self, reason: str) -> None: ...
    def set_reason(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def explain(self, operation: int, elems: int, dtype: int, in_arena: bool) -> str: ...
