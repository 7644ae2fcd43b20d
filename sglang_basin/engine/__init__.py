"""Basin inside SGLang: the only package, with `platforms`, that touches sglang.srt.

Data flows through the rooms in this order: `identity` (HTTP process: who is calling), `gate` (scheduler, rank 0:
which call goes on now), with `control` carrying questions and verdicts between decode and prefill in the words of
`messages`. `hooks` is the table of every place in SGLang that is touched, `plugin` registers it, `flags` names the
SGLang flags that Basin needs. A refused call's way back to its client goes through `answers` (scheduler) and
`refusals` (HTTP process). For those who watch: `metrics` counts, `status` and `figures` tell the present state,
`http_app` puts that on the server, `decision_log` keeps what was decided.
"""
