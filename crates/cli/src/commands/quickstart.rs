//! x
use crate::cli::QuickstartArguments;
use crate::failure::Result;
pub(crate) fn run(_: &QuickstartArguments, _: bool) -> Result<()> {
    Ok(())
}
