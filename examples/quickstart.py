"""A session, a step, a stream: python examples/quickstart.py [MODEL]     (default: smollm2)"""

import asyncio
import sys

import agentkv


async def main(model: str = "smollm2") -> None:
    short = agentkv.DecodingConfig(max_new_tokens=48, repetition_penalty=1.1)
    async with agentkv.open(model) as manager, manager.session("quickstart") as session:
        result = await session.step("What is a key-value cache? One sentence.", decoding=short)
        print(result.text)
        print(result.usage)

        # The second step reads nothing of the first anew: its KV is cached, only the new tokens are prefilled.
        async with session.stream("And why is it large?", decoding=short) as stream:
            async for event in stream:
                if isinstance(event, agentkv.Text):
                    print(event.text, end="", flush=True)
                elif isinstance(event, agentkv.Done):
                    print(f"\n{event.result.usage}\n{event.result.trace.rounds}, committed as {session.head}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
