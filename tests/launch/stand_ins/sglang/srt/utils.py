def kill_process_tree(pid: int, include_parent: bool = True) -> None:
    print("process tree ended", flush=True)
