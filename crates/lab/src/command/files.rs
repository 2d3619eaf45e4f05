//! The files for the results of the lab.

use crate::command::args::LabFilesArgs;
use crate::command::error::CommandError;
use foliomem_lab::columns;
use foliomem_lab::parquet_file::ParquetFile;
use foliomem_lab::report;
use foliomem_lab::sweep::Run;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// The requested files. They are created before the runs, so that an unwritable path fails before
/// hours of simulation.
pub struct Files<'a> {
    is_json_to_stdout: bool,
    json: Option<(&'a Path, File)>,
    html: Option<(&'a Path, File)>,
    parquet: Option<(&'a Path, File)>,
}

fn unwritable(path: &Path) -> impl FnOnce(std::io::Error) -> CommandError {
    move |error| CommandError::Runs(path.to_owned(), error)
}

fn create(path: &Path) -> Result<(&Path, File), CommandError> {
    Ok((path, File::create(path).map_err(unwritable(path))?))
}

impl Files<'_> {
    /// Creates the requested files.
    pub fn create(args: &LabFilesArgs) -> Result<Files<'_>, CommandError> {
        let json = args.json.as_deref().filter(|path| *path != Path::new("-"));
        Ok(Files {
            is_json_to_stdout: args.json.is_some() && json.is_none(),
            json: json.map(create).transpose()?,
            html: args.html.as_deref().map(create).transpose()?,
            parquet: args.parquet.as_deref().map(create).transpose()?,
        })
    }

    /// Writes runs of the scenario of `text`, from the file `name`. Returns whether stdout has the
    /// runs, too.
    pub fn write(self, name: &str, text: &str, runs: &[Run]) -> Result<bool, CommandError> {
        if let Some((path, mut file)) = self.json {
            writeln!(file, "{}", serde_json::json!(runs)).map_err(unwritable(path))?;
        }
        if let Some((path, mut file)) = self.html {
            file.write_all(report::page(name, text, runs)?.as_bytes()).map_err(unwritable(path))?;
        }
        if let Some((path, file)) = self.parquet {
            let columns = columns::of_runs(name, text, runs)?;
            let write = || {
                let mut parquet = ParquetFile::new(file, &columns, &[])?;
                parquet.write(&columns)?;
                parquet.finish()
            };
            write().map_err(unwritable(path))?;
        }
        if self.is_json_to_stdout {
            println!("{}", serde_json::json!(runs));
        }
        Ok(self.is_json_to_stdout)
    }
}
