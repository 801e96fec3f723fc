"""Builds the kernels into the clone as well: in its folder, Python imports from the sources."""

from setuptools import setup
from setuptools.command.build_ext import build_ext


class BuildExt(build_ext):
    def run(self) -> None:
        super().run()
        self.copy_extensions_to_source()


setup(cmdclass={"build_ext": BuildExt})
