"""Say where the packages lie: two of them at the top level, which links in `autopart/` also show to tools and readers.

Wheels and installations never depend on these links: zip files, some file systems and Windows drop them.
"""

from setuptools import find_packages, setup

AT_THE_TOP = {"autopart.passes": "passes", "autopart.runtime": "runtime"}

packages = [
    name for name in find_packages(include=["autopart", "autopart.*"]) if not name.startswith(tuple(AT_THE_TOP))
]
for package, folder in AT_THE_TOP.items():
    packages += [package, *(f"{package}.{name}" for name in find_packages(folder))]

setup(packages=packages, package_dir=AT_THE_TOP)
