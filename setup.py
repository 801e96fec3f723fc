"""Installation that leaves the kernels in the clone as well, where Python may import from."""

import os
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    def run(self) -> None:
        super().run()
        self.copy_extensions_to_source()

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_together(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                compiled = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [object_file for each in compiled for object_file in each]

        self.compiler.compile = compile_together
        super().build_extensions()


setup(cmdclass={"build_ext": BuildExt})
