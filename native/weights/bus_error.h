// Why a process that reads a mapped file dies of SIGBUS.
#pragma once

namespace quire {

// From now on, a page of a mapped file that cannot be read (the file was truncated, its disk failed) is told in one
// line on stderr with the file's path, before the signal does what it did without this. Called again, it does nothing.
void explain_bus_errors();

}  // namespace quire
