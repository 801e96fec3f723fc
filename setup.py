"""Installation that leaves the kernels in the clone as well, where Python may import from."""

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    def run(self) -> None:
        super().run()
        self.copy_extensions_to_source()


setup(cmdclass={"build_ext": BuildExt})
